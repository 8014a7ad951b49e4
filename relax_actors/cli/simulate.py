"""`relax simulate`: what a cluster that one does not have would make of a run.

Every mode is a run of its own, of the real actors, broker and table; only the engines are simulated. Times are reported
in simulated seconds. The trainer's idle time is what passed until the last row of its step was there. Then it reads the
rows, which takes this machine's own time: that is no time of a simulated engine, so it is not divided by `time_scale`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from relax_actors.cli.check import require
from relax_actors.cli.up import Watcher, explain, keep_up, log_to
from relax_actors.config import Config, load_config, validate
from relax_actors.errors import ConfigError, RelaxError
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.recorded import read_metrics, with_recorded
from relax_actors.runtime import logs
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.simulation.devices import Devices
from relax_actors.simulation.durations import calibrated
from relax_actors.supervision.root import Root

SAMPLE_SECONDS = 0.02
STARVING = 0.005
"""Share of a step that a trainer waits for rows, from which on it has too few rollout devices."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How the devices are used."""

    placement: Literal["colocated", "separate"]
    staleness: int
    rollout_devices: int

    @property
    def name(self) -> str:
        """As shown."""
        return "colocated" if self.placement == "colocated" else f"separate, max {self.staleness}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a mode comes to, over the measured steps; times in simulated seconds, shares of a step."""

    mode: str
    rollout_devices: int
    trainer_devices: int
    step_seconds: float
    steps_per_hour: float
    trainer_idle_seconds: float
    trainer_idle_share: float
    generation_idle_share: float
    lead: float
    staleness_mean: float
    staleness_max: int
    overhead_seconds: float
    """Of this machine's own time, from a step's last row to its start: part of `step_seconds` as it is, not scaled."""
    ratio: float | None = None
    """Steps an hour over those of `colocated`."""


class _Sampler(threading.Thread):
    """Looks, again and again, which share of the rollout's devices has something to do."""

    def __init__(self, config: Config) -> None:
        super().__init__(name="sampler", daemon=True)
        if config.simulate is None:
            raise ConfigError(NO_SECTION)
        self._devices = Devices(config.simulate, config.folder)
        self._number = config.simulate.devices_of("rollout")
        self._halt = threading.Event()
        self.samples: list[tuple[float, float]] = []

    def run(self) -> None:
        """Sample until stopped."""
        while not self._halt.wait(SAMPLE_SECONDS):
            share = min(1.0, int(self._devices.running.sum()) / self._number)
            self.samples.append((time.time(), share))

    def idle(self, begin: float, end: float) -> float:
        """Mean share of devices without a sample between two times (seconds since 1970)."""
        self._halt.set()
        found = [share for at, share in self.samples if begin <= at <= end]
        return 1.0 - float(np.mean(found)) if found else 0.0


NO_SECTION = "relax simulate needs a section [simulate]; examples/simulate has some"


def configured(config: Config, mode: Mode, folder: Path) -> Config:
    """The configuration of a mode's run: as many rows in generation as may be admitted, steps to fill and to drain."""
    if config.simulate is None:
        raise ConfigError(NO_SECTION)
    rows = config.trainer.prompts_per_step * (mode.staleness + 1)
    body: dict[str, Any] = config.model_dump(mode="json")
    body["run"] |= {"folder": str(folder), "steps": config.simulate.steps + 2 * mode.staleness + 2}
    body["rollout"]["replicas"] = -(-rows // config.rollout.max_concurrent_prompts)
    body["staleness"]["max"] = mode.staleness
    body["simulate"] |= {"placement": mode.placement, "rollout_devices": mode.rollout_devices}
    return validate(body, f"relax simulate, {mode.name}")


def predict(config: Config, mode: Mode, import_path: str, console: Console) -> Prediction:
    """Run a mode and measure it.

    Raises:
        RelaxError: it could not be kept up, or was interrupted.
    """
    scratch = Path(tempfile.mkdtemp(prefix="relax-simulate-"))
    derived = configured(config, mode, scratch)
    require(derived)
    root = Root(derived, import_path)
    log_to(root.folder)
    watcher = Watcher(root, console, live=False, lines=False)
    sampler = _Sampler(derived)
    sampler.start()
    failure, _ = keep_up(root, watcher)
    if failure is not None:
        explain(console, failure, root.folder)
    if failure is not None or watcher.result is None:
        msg = f"the run of {mode.name} ended before its last step; its folder is {scratch}"
        raise RelaxError(msg)
    prediction = measure(root.folder, mode, sampler.idle)
    shutil.rmtree(scratch)
    return prediction


def measure(folder: RunFolder, mode: Mode, idle: Callable[[float, float], float]) -> Prediction:
    """What the log of a mode's run says of its measured steps."""
    with connected(str(folder.root)) as at:
        bodies = {int(body["step"]): body for body in read_metrics(at.table, "trainer", "step")}
        leads = [(body["time"], body["lead"]) for body in read_metrics(at.table, "prompts") if "lead" in body]
        simulate = at.config.simulate
    if simulate is None:
        raise ConfigError(NO_SECTION)
    first, count = mode.staleness + 2, simulate.steps
    steps = [bodies[step] for step in range(first, first + count)]
    begin, end, scale = bodies[first - 1]["time"], steps[-1]["time"], simulate.time_scale

    def mean(name: str) -> float:
        return float(np.mean([step.get(name, 0.0) for step in steps]))

    starved = mean("starved_seconds")
    overhead = mean("waited_seconds") - starved
    seconds = ((end - begin) / count - overhead) / scale + overhead
    # Told about once a second: the one before the first that lies in between holds there too.
    measured = [lead for at, lead in leads if begin - 1 <= at <= end] or [0]
    return Prediction(
        mode=mode.name,
        rollout_devices=simulate.devices_of("rollout"),
        trainer_devices=simulate.devices_of("trainer"),
        step_seconds=round(seconds, 2),
        steps_per_hour=round(3600 / seconds, 2),
        trainer_idle_seconds=round(starved / scale, 3),
        trainer_idle_share=round(starved / scale / seconds, 5),
        generation_idle_share=round(idle(begin, end), 4),
        lead=round(float(np.mean(measured)), 2),
        staleness_mean=round(mean("staleness_mean"), 3),
        staleness_max=max(int(step["staleness"]) for step in steps),
        overhead_seconds=round(overhead, 4),
    )


def best_split(predicted: Callable[[int], Prediction], devices: int, move: int) -> int:
    """The number of rollout devices with the shortest step.

    With few of them the trainer starves, with many it has too few itself: the range is halved until it just does not
    starve, and the better of the two numbers around that place is taken.
    """
    numbers = list(range(move, devices, move))
    low, high = 0, len(numbers) - 1
    while low < high:
        middle = (low + high) // 2
        if predicted(numbers[middle]).trainer_idle_share > STARVING:
            low = middle + 1
        else:
            high = middle
    return min(numbers[max(0, low - 1) : low + 1], key=lambda n: predicted(n).step_seconds)


def simulate(path: Path, settings: list[str], *, split: bool, as_json: bool) -> int:
    """The verb; gives the exit code."""
    logs.configure()
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 120)
    config = calibrated(with_recorded(load_config(path, settings)))
    if config.simulate is None:
        raise ConfigError(NO_SECTION)
    section, import_path = config.simulate, str(path.resolve().parent)
    colocated = Mode("colocated", 0, section.rollout_devices)
    separate = [Mode("separate", staleness, section.rollout_devices) for staleness in section.staleness]
    found: dict[Mode, Prediction] = {}

    def predicted(mode: Mode) -> Prediction:
        if mode not in found:
            console.print(f"{mode.name}: {mode.rollout_devices} of {section.devices} devices generate", style="dim")
            found[mode] = predict(config, mode, import_path, console)
        return found[mode]

    base = predicted(colocated).step_seconds
    for mode in separate:
        predicted(mode)
    best: int | None = None
    if split and separate:
        last = separate[-1]
        best = best_split(lambda n: predicted(Mode("separate", last.staleness, n)), section.devices, section.move)
    results = [
        Prediction(**{**asdict(p), "ratio": round(base / p.step_seconds, 3)})
        for _, p in sorted(
            found.items(), key=lambda item: (item[0].placement, item[0].staleness, item[1].rollout_devices)
        )
    ]
    _show(console, config, results, best)
    if as_json:
        sys.stdout.write(json.dumps(_body(config, results, best)) + "\n")
    return 0


def _body(config: Config, results: list[Prediction], best: int | None) -> dict[str, Any]:
    simulate = config.simulate
    fitted = {}
    if simulate is not None and simulate.calibration is not None:
        fitted = {
            "token_seconds": simulate.generation.token_seconds,
            "device_seconds": simulate.training.device_seconds,
        }
    return {
        "run": config.run.name,
        "time_scale": simulate.time_scale if simulate else None,
        "fitted": fitted,
        "modes": [asdict(result) for result in results],
        "best_rollout_devices": best,
    }


def _show(console: Console, config: Config, results: list[Prediction], best: int | None) -> None:
    title = f"{config.run.name}: simulated seconds"
    table = RichTable(title=title, caption=None if best is None else f"best split: {best} devices generate")
    for column in (
        "mode",
        "generate/train",
        "step s",
        "steps/h",
        "ratio",
        "trainer idle",
        "generation idle",
        "lead",
        "staleness mean/max",
        "overhead ms",
    ):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for r in results:
        table.add_row(
            r.mode,
            f"{r.rollout_devices}/{r.trainer_devices}",
            f"{r.step_seconds:.1f}",
            f"{r.steps_per_hour:.1f}",
            f"{r.ratio:.2f}",
            f"{r.trainer_idle_share:.2%}",
            f"{r.generation_idle_share:.1%}",
            f"{r.lead:.1f}",
            f"{r.staleness_mean:.2f}/{r.staleness_max}",
            f"{1000 * r.overhead_seconds:.0f}",
        )
    console.print(table)
