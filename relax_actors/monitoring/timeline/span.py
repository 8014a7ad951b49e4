"""Spans and instants of a run. All times are Unix seconds by the broker's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """Time in which something was done.

    Attributes:
        name: what was done: a column of a row, `train`, `wait`, `checkpoint`, `start`, ...
        begin: when it could begin: when the last input was stored.
        end: when its result was stored.
        actor: actor that did it, `<role>.<n>`.
        row: row that it was done for, such as `group.12.3`; empty if for none.
        step: step that it belongs to; None if to none.
        arguments: further facts.
    """

    name: str
    begin: float
    end: float
    actor: str
    row: str = ""
    step: int | None = None
    arguments: Mapping[str, str | float | int] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """Role of the actor."""
        return self.actor.rpartition(".")[0] or self.actor


@dataclass(frozen=True, slots=True)
class Instant:
    """An event.

    Attributes:
        name: kind of the event.
        time: when it was stored.
        actor: actor that it is about.
        detail: its error or reason in a line; empty without.
    """

    name: str
    time: float
    actor: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans and instants of a run, in the order of their times."""

    run: str
    spans: tuple[Span, ...]
    instants: tuple[Instant, ...]
