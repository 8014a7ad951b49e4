"""Cells `turns.0.<k>` of a row: turns of its samples, from which an actor continues."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages.environment import EnvironmentAnswer
from relax_actors.messages.media import ObservedMedia
from relax_actors.messages.samples import FinishReason

Array = NDArray[Any]
ROOT = -1
"""Parent of a turn that continues no other."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer of the policy, and what it answered.

    Attributes:
        parent: number of the turn that it continues, or `ROOT`.
        observed: `[len] int32`, tokens between the parent's last one and the answer; the whole prompt for a root.
        tokens: `[len] int32`, the answer.
        logprobs: `[len] float32`.
        versions: `[len] int32`, version of the weights that sampled each token.
        finish_reason: why the answer ended, a `FinishReason`.
        asked: key of the conversation that was asked to be continued (`sessions.continuations.conversation_keys`).
        state: key of the conversation with the answer, as the client sees it.
        call: id of the request, by which a repeated request finds its answer.
        messages: the messages that follow the parent's answer, and the answer.
        player: whose turn it is; empty without players.
        media: media of `observed`, in order; a first one that starts at token 0 is in place of the row's prompt.
        experts: experts chosen for each token of `observed` and `tokens` but the last, behind that of the parent's last
            token, `[tokens, moe_layers, experts_per_token]` as `messages.experts.compact` gives them; None if they are
            not recorded.
        entropies: `[len] float32`, entropy of the policy at each token of `tokens`; None unless record.entropy.
    """

    parent: int
    observed: Array
    tokens: Array
    logprobs: Array
    versions: Array
    finish_reason: str = FinishReason.STOP
    asked: str = ""
    state: str = ""
    call: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    player: str = ""
    media: list[ObservedMedia] = field(default_factory=list)
    experts: Array | None = None
    entropies: Array | None = None

    def __post_init__(self) -> None:
        arrays = [self.tokens, self.logprobs, self.versions, *([] if self.entropies is None else [self.entropies])]
        if self.parent < ROOT or len(set(map(len, arrays))) > 1:
            msg = "a turn has arrays of different lengths, or a parent with a negative number"
            raise ValueError(msg)
        if self.finish_reason not in set(FinishReason):
            msg = f"finish reason {self.finish_reason[:40]!r} of a turn is unknown"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A turn of a sample.

    Attributes:
        sample: index of the sample.
        number: number of the turn in its attempt; with agents, in the sample.
        turn: the turn.
        attempt: attempt of an episode; one whose environment cannot be resumed begins again.
        before: digest of an episode before the observation, so that turns of two actors are never mixed.
        seen: what the environment of an episode answered before the turn; None with agents.
    """

    sample: int
    number: int
    turn: Turn
    attempt: int = 0
    before: str = ""
    seen: EnvironmentAnswer | None = None

    def __post_init__(self) -> None:
        if min(self.sample, self.attempt, self.number) < 0:
            msg = f"turn {self.number} of sample {self.sample} has a negative number"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class SessionStep:
    """What the run's environment answered to an agent.

    Attributes:
        sample: index of the sample.
        attempt: attempt of the sample.
        number: 0 for the reset, k + 1 for the answer to action k.
        action: text of the agent; empty for the reset.
        seen: the answer.
    """

    sample: int
    attempt: int
    number: int
    action: str
    seen: EnvironmentAnswer

    def __post_init__(self) -> None:
        if min(self.sample, self.attempt, self.number) < 0:
            msg = f"step {self.number} of sample {self.sample} has a negative number"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class SessionState:
    """A sample was given to another agent, or ended.

    Attributes:
        sample: the sample.
        attempt: times that it was given out again, or that its episode began again.
        reason: why it ended, a `FinishReason`; empty if it goes on.
        reward: reward of its agent; None if it gave none.
        metrics: measurements of its agent.
        forgets: whether the next agent gets other answers than the one that failed.
        turns: numbers of the turns that its agent got, where the sample ended; later ones and others are not exported.
        rewards: rewards that its agent gave to players, by name.
        number: turns of an episode that has ended.
        before: digest of an episode that has ended.
        seen: what its environment answered last.
    """

    sample: int
    attempt: int
    reason: str = ""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    forgets: bool = False
    turns: list[int] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    number: int = 0
    before: str = ""
    seen: EnvironmentAnswer | None = None

    def __post_init__(self) -> None:
        numbers = [*self.metrics.values(), *self.rewards.values(), 0.0 if self.reward is None else self.reward]
        if not np.isfinite(numbers).all() or min(self.sample, self.attempt, self.number, *self.turns) < 0:
            msg = f"state of sample {self.sample} has a number that is negative or not finite"
            raise ValueError(msg)
        if self.reason and self.reason not in set(FinishReason):
            msg = f"reason {self.reason[:40]!r} of sample {self.sample} is unknown"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class SessionLog:
    """Cell `turns.0.<k>`: events of a row since the previous cell, turns before states.

    Attributes:
        turns: turns, those of a sample in order.
        states: states, those of a sample in order.
        seconds: time that actors have spent on the row so far.
        steps: of the run's environment in sessions of agents, those of a sample in order.
    """

    turns: list[SessionTurn] = field(default_factory=list)
    states: list[SessionState] = field(default_factory=list)
    seconds: float = 0.0
    steps: list[SessionStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < math.inf:
            msg = f"a log of {self.seconds} seconds"
            raise ValueError(msg)
