"""Recorded observations of real healthy runs, and how a fault changes them.

The files are written by `relax doctor RUN --save tests/support/recorded/NAME.jsonl.gz`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path

from relax_actors.devices.machine import MachineUse
from relax_actors.monitoring.diagnosis import Event, Observations, Reading
from relax_actors.monitoring.diagnosis.log_reader import load_observed

FOLDER = Path(__file__).parent / "recorded"
NAMES = sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.jsonl.gz"))


def recorded(name: str, steps: int | None = None) -> Observations:
    """Return the observations of a run, or of its first steps."""
    seen = load_observed(FOLDER / f"{name}.jsonl.gz")
    if steps is not None:
        seen.steps = {step: figures for step, figures in seen.steps.items() if step < steps}
        seen.fingerprints = {version: each for version, each in seen.fingerprints.items() if version <= steps}
    return seen


def recorded_machine() -> MachineUse:
    """Return what `read_machine` read on a machine with an NVIDIA GPU that multiplied matrices."""
    found = MachineUse.of(json.loads((FOLDER / "machine.json").read_text()))
    assert found is not None
    return found


def alter(seen: Observations, **figures: float | Callable[[int], float]) -> None:
    """Replace figures of the steps by numbers, or by functions of the step."""
    for step, own in sorted(seen.steps.items()):
        own |= {name: value(step) if callable(value) else value for name, value in figures.items()}


def happen(seen: Observations, kind: str, count: int = 1, *, sender: str = "reward.0", text: str = "") -> None:
    """Add events, a second apart."""
    begin = seen.events[-1].time if seen.events else 0.0
    for k in range(count):
        seen.events.append(Event(begin + k, sender, kind, text, f"group.{k}.0"))


def read(seen: Observations, actor: str, count: int = 60, **figures: Callable[[int], float]) -> None:
    """Replace the readings of an actor; each function gets the number of the reading, one a second."""
    readings = (Reading(1e9 + k, {name: value(k) for name, value in figures.items()}) for k in range(count))
    seen.actors[actor] = deque(readings)
