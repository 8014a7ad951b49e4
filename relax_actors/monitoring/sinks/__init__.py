"""Where a monitor writes what it hears, besides the terminal."""

from __future__ import annotations

import json
import sys
from typing import Any, Protocol

TOKENS = 5
MOST_STEPS = 1 << 53


class Sink(Protocol):
    """Takes in messages of a run's log."""

    def take(self, heard: Heard) -> None:
        """Take one message in."""

    def close(self) -> None:
        """Write what is left."""


class Heard:
    """A message of `relax.<run>.event.>` or `relax.<run>.metric.>`: its tokens, and the JSON object that it holds."""

    __slots__ = ("body", "is_event", "n", "role", "run")

    def __init__(self, run: str, role: str, n: str, body: dict[str, Any], *, is_event: bool) -> None:
        self.run, self.role, self.n, self.body, self.is_event = run, role, n, body, is_event

    @classmethod
    def read(cls, subject: str, data: bytes) -> Heard | None:
        """A message read; None if it is none of ours."""
        tokens = subject.split(".")
        if len(tokens) < TOKENS or tokens[2] not in ("event", "metric"):
            return None
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return (
            cls(tokens[1], tokens[3], tokens[4], body, is_event=tokens[2] == "event")
            if isinstance(body, dict)
            else None
        )

    @property
    def kind(self) -> str:
        """What kind of event it is, or of what the measurements are; empty for those of an actor."""
        return str(self.body.get("kind", ""))[:64]

    def numbers(self) -> dict[str, float]:
        """What was measured, by name."""
        skipped = ("time", "n", "kind", "role")
        return {
            name: float(value)
            for name, value in self.body.items()
            if name not in skipped and isinstance(value, int | float) and abs(value) <= sys.float_info.max
        }

    def scalars(self) -> tuple[int, dict[str, float]] | None:
        """What is drawn over optimizer steps: of a step `step/<name>`, of the evaluation of a version `eval/reward`."""
        numbers = self.numbers()
        if any(abs(numbers.get(name, 0.0)) >= MOST_STEPS for name in ("step", "version")):
            return None
        if self.kind == "step" and not self.is_event and "step" in numbers:
            step = int(numbers.pop("step"))
            return step, {f"step/{name}": value for name, value in numbers.items()}
        if self.kind == "evaluated" and self.is_event and {"version", "reward"} <= numbers.keys():
            return int(numbers["version"]), {"eval/reward": numbers["reward"]}
        return None
