"""Requests to the actors that host environments, and their answers. No stream stores them.

Turns of a session count from 0: turn `t` is the action `t` and what the environment answered to it. The answer to the
opening of a session has turn -1; if recorded actions were replayed, it is the answer to the last of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgpack
import xxhash

OPENED = -1
"""Turn of the answer that opens a session."""


class Fault(StrEnum):
    """Why an operation on a session failed."""

    ENVIRONMENT = "environment"
    """The environment raised, hung, died, or returned something that is no answer. Counts against the sample."""
    REPLAY = "replay"
    """The replayed actions gave other observations than recorded: the sample starts again."""
    LOST = "lost"
    """The actor does not know the session, or is gone: open the session again."""
    BUSY = "busy"
    """The actor hosts as many sessions as it may: try again."""


@dataclass(frozen=True, slots=True)
class Open:
    """Open a session; a session of the same name is closed first.

    Attributes:
        session: name of the session, unique within the run.
        task: the row's task as plain data: prompt, answer and metadata.
        seed: seed of the environment's random numbers, from (row seed, sample) alone.
        state: what `Environment.state` returned after the last of `actions`, to restore; None to replay the actions.
        actions: actions of earlier turns.
        digests: digests of their answers (`EnvironmentAnswer.digest`), compared with the replay; may be shorter.
    """

    session: str
    task: dict[str, Any]
    seed: int
    state: bytes | None = None
    actions: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Act:
    """Take a turn with what the model wrote; a repeated turn gets the same answer.

    Attributes:
        session: name of the session.
        turn: number of the action, from 0.
        action: text of the model.
    """

    session: str
    turn: int
    action: str


@dataclass(frozen=True, slots=True)
class EnvironmentRequest:
    """Operations on sessions of one actor.

    Attributes:
        opens: sessions to open.
        acts: turns to take.
        closes: names of sessions to close; these get no answer.
    """

    opens: list[Open] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    closes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EnvironmentAnswer:
    """What an environment answered to an action, or to the opening of its session.

    Attributes:
        session: name of the session.
        turn: number of the action; -1 for the first observation.
        messages: observation as chat messages, `{"role": ..., "content": text or parts}`.
        reward: reward of the turn; None if the environment gave none.
        rewards: rewards by player; added to the last turn of each.
        player: player that reads the observation and acts next; empty for the one that has acted, or without players.
        done: whether the episode has ended.
        truncated: whether it ended without a result, by a limit of the environment.
        metrics: measurements of the turn.
        state: state of the environment after the turn, to restore it from; None if it is replayed instead.
        error: why the operation failed; empty if it succeeded.
        detail: text of the error.

    Raises:
        ValueError: a number is not finite, or the error is not one of `Fault`.
    """

    session: str
    turn: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    state: bytes | None = None
    error: str = ""
    detail: str = ""
    player: str = ""
    rewards: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.reward or 0.0, *self.rewards.values(), *self.metrics.values()))):
            msg = f"reward {self.reward or self.rewards} or a metric of an environment is not finite"
            raise ValueError(msg)
        if self.error and self.error not in tuple(Fault):
            msg = f"error {self.error[:80]!r} of an environment is none of {', '.join(Fault)}"
            raise ValueError(msg)

    @property
    def digest(self) -> str:
        """Hash of observation, rewards, player and end, to compare a replay with the record."""
        plain = [
            _hashed(self.messages),
            self.reward,
            self.done,
            self.truncated,
            self.player,
            sorted(self.rewards.items()),
        ]
        return xxhash.xxh3_64_hexdigest(msgpack.packb(plain, use_bin_type=True))

    def without_bytes(self) -> EnvironmentAnswer:
        """Return the answer with hashes in place of the bytes of media; its digest stays the same."""
        return replace(self, messages=_hashed(self.messages))


def _hashed(value: Any) -> Any:
    """Return plain data with the hash of bytes in place of the bytes."""
    if isinstance(value, bytes):
        return f"xxh3:{xxhash.xxh3_128_hexdigest(value)}"
    if isinstance(value, dict):
        return {name: _hashed(item) for name, item in value.items()}
    return [_hashed(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class EnvironmentAnswers:
    """Answers that are ready; an empty message reports that the actor works.

    Attributes:
        answers: answers to operations of the request.
        remaining: number of operations of the request that have no answer yet.
    """

    answers: list[EnvironmentAnswer] = field(default_factory=list)
    remaining: int = 0
