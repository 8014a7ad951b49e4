"""Events and metrics of a run, read so that nobody can pose as another.

The broker lets each user publish on its own subjects only, so role, number and kind are those of the subject. A body
that says something else makes a false claim: it is counted and shown, and counts as nothing else.
"""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, Self

from broker.subjects import NAME
from relax_actors.printable import printable
from relax_actors.runtime.journal import MAX_BYTES

MAX_STEP = 1 << 53
MAX_NAME, MAX_NUMBERS = 64, 256
"""Length of the name of a measurement, and measurements of one message."""
EVENT_TOKENS, METRIC_TOKENS = 6, 5
"""Tokens of `relax.<run>.event.<role>.<n>.<kind>` and of `relax.<run>.metric.<role>.<n>`."""
_NUMBERS, _MOST = frozenset((int, float, bool)), sys.float_info.max
"""Types of a number in JSON, and the largest one that is finite."""
_PLAIN = (str, int, float)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
AUTHORS = {
    "finished": ("run",),
    "run": ("run",),
    "step": ("trainer",),
    "critic": ("critic",),
    "resuming": ("trainer",),
    "strays_removed": ("trainer",),
    "table_full": ("trainer",),
    "evaluated": ("evaluator",),
    "supervision": ("node", "root"),
    "fault": ("chaos",),
}
"""Roles that may publish an event or metric of a kind; other kinds may come from every role."""


@dataclass(frozen=True, slots=True)
class LogMessage:
    """Message of `relax.<run>.event.>` or `relax.<run>.metric.>`.

    Attributes:
        run: name of the run.
        role: role of the actor that published it.
        n: number of the actor.
        kind: kind of the event or metric: `step` for an optimizer step, empty for an actor's state.
        body: the JSON object; unchecked.
        is_event: an event, else a metric.
        claim: what the body falsely says to be, e.g. `trainer.0`; empty for an honest message.
    """

    run: str
    role: str
    n: str
    kind: str
    body: dict[str, Any]
    is_event: bool
    claim: str = ""

    @classmethod
    def parse(cls, subject: str, data: bytes) -> Self | None:
        """Parse a message; None unless it is an event or metric of valid size."""
        origin = _origin(subject)
        if origin is None or len(data) > MAX_BYTES:
            return None
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(body, dict):
            return None
        run, role, n, event = origin
        kind = _text(body.get("kind", "")) if event is None else event
        return cls(run, role, n, kind, body, event is not None, _claim(role, n, kind, body))

    @property
    def sender(self) -> str:
        """Actor that published the message: `<role>.<n>`."""
        return f"{self.role}.{self.n}"

    def numbers(self) -> dict[str, float]:
        """Return finite measurements by name, without ids; at most `MAX_NUMBERS`."""
        found: dict[str, float] = {}
        for name, value in self.body.items():  # of 40 figures in each step of a long run
            if type(value) in _NUMBERS and -_MOST <= value <= _MOST and _is_measurement(name):
                found[name] = float(value)
                if len(found) == MAX_NUMBERS:
                    break
        return found

    def figures(self) -> tuple[int, tuple[str, ...], tuple[float, ...]] | None:
        """Return a step with the names and values of `scalars`; fast for messages with the same fields."""
        body, step = self.body, self.body.get("step")
        if self.kind in ("step", "critic") and not self.is_event and type(step) is int and "version" not in body:
            names, read = _reader(self.kind, tuple(body), tuple(map(type, body.values())))
            with suppress(OverflowError):  # of an integer that no float holds: two of them may have a finite sum
                values = () if read is None else tuple(map(float, read(body)))
                if values and math.isfinite(sum(values)) and abs(step) < MAX_STEP:
                    return step, names, values
        if (scalars := self.scalars()) is None:
            return None
        return scalars[0], tuple(scalars[1]), tuple(scalars[1].values())

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
            return step, {_figure(self.kind, name): value for name, value in numbers.items()}
        if self.kind == "evaluated" and self.is_event and {"version", "reward"} <= numbers.keys():
            return int(numbers["version"]), {"eval/reward": numbers["reward"]}
        return None


@lru_cache(maxsize=4096)
def _origin(subject: str) -> tuple[str, str, str, str | None] | None:
    """Return run, role, number, and kind of an event or None of a metric; None for other subjects."""
    tokens = subject.split(".")
    is_event = tokens[2:3] == ["event"]
    if len(tokens) != (EVENT_TOKENS if is_event else METRIC_TOKENS) or tokens[2] not in ("event", "metric"):
        return None
    run, role, n = tokens[1], tokens[3], tokens[4]
    if not _NUMBER.fullmatch(n) or not all(NAME.fullmatch(name) for name in (run, role, *tokens[5:])):
        return None
    return run, role, n, tokens[5] if is_event else None


@lru_cache(maxsize=256)
def _reader(kind: str, names: tuple[str, ...], types: tuple[type, ...]) -> tuple[tuple[str, ...], Any]:
    """Return the names of the figures of a step, and what reads their values from a body with these fields."""
    found = [name for name, own in zip(names, types, strict=True) if own in _NUMBERS and _is_measurement(name)]
    figures = [name for name in found[:MAX_NUMBERS] if name != "step"]
    is_fast = 1 < len(figures) < len(found[:MAX_NUMBERS])  # `scalars` does not see a step after them
    return tuple(_figure(kind, name) for name in figures), (itemgetter(*figures) if is_fast else None)


@lru_cache(maxsize=4096)
def _figure(kind: str, name: str) -> str:
    """Return the name of a figure of a step: the same text each time, whose hash is computed once."""
    return f"{kind}/{name}"


@lru_cache(maxsize=4096)
def _is_measurement(name: str) -> bool:
    """Whether a field may be a measurement: it can be shown, and does not identify the message."""
    return name not in ("time", "n", "kind", "role") and len(name) <= MAX_NAME and printable(name) == name


def _claim(role: str, n: str, kind: str, body: dict[str, Any]) -> str:
    """Return what a body falsely claims; empty if it fits its subject and role."""
    said_role, said_n, said_kind = (_text(body.get(*field)) for field in (("role", role), ("n", n), ("kind", kind)))
    if (said_role, said_n) != (role, n):
        return printable(f"{said_role}.{said_n}")
    for name in (kind, said_kind):
        if role not in (authors := AUTHORS.get(name, (role,))):
            return f"{authors[0]}.0"
    return "" if said_kind == kind else printable(f"{role}.{n}.{said_kind}")


def _text(value: object) -> str:
    """Return the text of a field that should be a name or a number; of another value, its type."""
    return str(value)[:MAX_NAME] if isinstance(value, _PLAIN) else type(value).__name__
