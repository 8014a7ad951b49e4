"""Cells of sessions: what the agents of a row asked and got, written before they get it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages.samples import FinishReason

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """An answer of the policy in a session: sample, number of the turn, and the fields of `serving.forest.Turn`."""

    sample: int
    number: int
    parent: int
    asked: str
    state: str
    observed: Array
    tokens: Array
    logprobs: Array
    versions: Array
    finish_reason: str
    call: str
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        negative = min(self.sample, self.number, self.parent + 1) < 0
        if negative or len({len(self.tokens), len(self.logprobs), len(self.versions)}) > 1:
            msg = f"a turn of sample {self.sample} has arrays of different lengths or a negative number"
            raise ValueError(msg)
        if self.finish_reason not in set(FinishReason):
            msg = f"finish reason {self.finish_reason[:40]!r} of a turn is unknown"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class SessionState:
    """A sample was given to another agent, or ended.

    Attributes:
        sample: the sample.
        attempt: times that it was given out again.
        reason: why it ended, a `FinishReason`; empty if it goes on.
        reward: reward of its agent; None if it gave none.
        metrics: measurements of its agent.
        forgets: whether the next agent gets other answers than the one that failed.
        turns: numbers of the turns that its agent got, where the sample ended; later ones and others are not exported.
    """

    sample: int
    attempt: int
    reason: str = ""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    forgets: bool = False
    turns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        numbers = [*self.metrics.values(), 0.0 if self.reward is None else self.reward]
        if not np.isfinite(numbers).all() or min(self.sample, self.attempt, *self.turns) < 0:
            msg = f"state of sample {self.sample} has a number that is negative or not finite"
            raise ValueError(msg)
        if self.reason and self.reason not in set(FinishReason):
            msg = f"reason {self.reason[:40]!r} of sample {self.sample} is unknown"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class SessionLog:
    """Cell `turns.<attempt>.<k>` of a row with agents: what happened since the cell before it."""

    turns: list[SessionTurn] = field(default_factory=list)
    states: list[SessionState] = field(default_factory=list)
