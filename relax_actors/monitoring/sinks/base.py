"""Protocol of a sink, and the log messages that it receives."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, Protocol, Self

MIN_TOKENS = 5
"""Tokens of `relax.<run>.event.<role>.<n>`."""
MAX_STEP = 1 << 53


class Sink(Protocol):
    """Destination of the events and metrics of one run, besides the terminal.

    A sink is made as `Sink(target, run)`: `target` is the text after `NAME=` of `--sink`, `run` the name of the run.
    For
    an unusable target or a missing package the constructor raises `ConfigError` with the remedy, or `OSError`.

    All methods are called from one thread. A method that blocks delays the terminal view, and messages are discarded
    meanwhile.
    """

    def take(self, message: LogMessage) -> None:
        """Receive one message, in the order of arrival; raise for no content.

        Ignore messages of no interest. Any client of the broker may have written the message, so its fields may be of
        any type and size.
        """

    def close(self) -> None:
        """Write what is buffered and free all resources; called once, as the last call."""


@dataclass(frozen=True, slots=True)
class LogMessage:
    """Message of `relax.<run>.event.>` or `relax.<run>.metric.>`.

    Attributes:
        run: name of the run.
        role: role of the actor that published it.
        n: number of the actor.
        body: the JSON object; unchecked.
        is_event: an event, else a metric.
    """

    run: str
    role: str
    n: str
    body: dict[str, Any]
    is_event: bool

    @classmethod
    def parse(cls, subject: str, data: bytes) -> Self | None:
        """Parse a message; None if it is neither an event nor a metric."""
        tokens = subject.split(".")
        if len(tokens) < MIN_TOKENS or tokens[2] not in ("event", "metric"):
            return None
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(body, dict):
            return None
        return cls(tokens[1], tokens[3], tokens[4], body, is_event=tokens[2] == "event")

    @property
    def kind(self) -> str:
        """Kind of the event or metric: `step` for an optimizer step, empty for an actor's state."""
        return str(self.body.get("kind", ""))[:64]

    def numbers(self) -> dict[str, float]:
        """Return the finite measurements by name, without fields that identify the message."""
        skipped = ("time", "n", "kind", "role")
        return {
            name: float(value)
            for name, value in self.body.items()
            if name not in skipped and isinstance(value, int | float) and abs(value) <= sys.float_info.max
        }

    def scalars(self) -> tuple[int, dict[str, float]] | None:
        """Return a step and its scalars, for charts over optimizer steps.

        The scalars of a step are `step/<name>`; of the critic, `critic/<name>`; of the evaluation of a version,
        `eval/reward`. None for any other message.
        """
        numbers = self.numbers()
        if any(abs(numbers.get(name, 0.0)) >= MAX_STEP for name in ("step", "version")):
            return None
        if self.kind in ("step", "critic") and not self.is_event and "step" in numbers:
            step = int(numbers.pop("step"))
            return step, {f"{self.kind}/{name}": value for name, value in numbers.items()}
        if self.kind == "evaluated" and self.is_event and {"version", "reward"} <= numbers.keys():
            return int(numbers["version"]), {"eval/reward": numbers["reward"]}
        return None
