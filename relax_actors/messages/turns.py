"""Turn cells: the turns of a row's samples, written while the row is generated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from relax_actors.messages.environment import EnvironmentAnswer
from relax_actors.messages.media import ObservedMedia
from relax_actors.messages.samples import FinishReason

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a sample: an observation, and what the model wrote behind it.

    Attributes:
        sample: index of the sample.
        attempt: attempt of the sample; a sample whose environment cannot be resumed begins again.
        number: index of the turn; a sample that has ended gets a last turn without tokens.
        before: digest of the sample before the observation, so that turns of two actors are never mixed.
        observed: the observation that the turn answers.
        context: `[len] int32`, tokens of the observation; of the whole conversation if the turn begins a new sequence.
        branches: whether the turn begins a new sequence.
        token_ids: `[len] int32`, sampled tokens.
        logprobs: `[len] float32`.
        versions: `[len] int32`.
        finish_reason: why the generation ended.
        ended: why the sample ended with the observation; empty if it continued.
        media: media of the observation; None if it is text alone.
    """

    sample: int
    attempt: int
    number: int
    before: str
    observed: EnvironmentAnswer
    context: Array
    branches: bool
    token_ids: Array
    logprobs: Array
    versions: Array
    finish_reason: str = FinishReason.STOP
    ended: str = ""
    media: ObservedMedia | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.versions)}
        if len(lengths) > 1 or min(self.sample, self.attempt, self.number) < 0:
            msg = f"turn {self.number} of sample {self.sample} has arrays of different lengths or a negative number"
            raise ValueError(msg)
        if not {self.finish_reason, self.ended or FinishReason.STOP} <= set(FinishReason):
            msg = f"{self.finish_reason!r} or {self.ended!r} is not one of {', '.join(FinishReason)}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Turns:
    """Cell `turns.<attempt>.<k>`: turns of a row's samples that ended together, in the actor's attempt at the row.

    Attributes:
        turns: the turns.
        seconds: time that actors have spent on the row so far.
    """

    turns: list[Turn]
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < math.inf:
            msg = f"turns of {self.seconds} seconds"
            raise ValueError(msg)
