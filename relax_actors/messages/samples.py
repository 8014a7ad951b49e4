"""Samples of a prompt as objects: sequences of tokens with masks, log-probs and versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
NOT_SAMPLED = -1
"""Version of a token that no policy sampled: a token of the prompt, a tool's answer, an observation."""


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Exactly the tokens that the model read and wrote, in order; all arrays are `[len]`.

    Attributes:
        token_ids: int32, from the first token of the prompt to the last token.
        loss_mask: bool, true for tokens that the policy sampled and that are trained. The first token cannot be.
        logprobs: float32, natural log-prob that a token was sampled with; 0 where no policy sampled it.
        versions: int32, version of the weights that sampled a token; -1 where no policy sampled it.
        spans: `[spans, 2] int32`, begin and end of each generation (a turn of the model), in order.
        routed_experts: `[len - 1, moe_layers, experts_per_token] int16`, the experts that were chosen for each token
            but the last, -1 where unknown; only with trainer.router_replay.
    """

    token_ids: Array
    loss_mask: Array
    logprobs: Array
    versions: Array
    spans: Array | None = None
    routed_experts: Array | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.logprobs), len(self.versions)}
        if len(lengths) > 1:
            msg = (
                f"a sequence has {len(self.token_ids)} token_ids, {len(self.loss_mask)} loss_mask, "
                f"{len(self.logprobs)} logprobs and {len(self.versions)} versions; give one of each for every token"
            )
            raise ValueError(msg)

    @classmethod
    def of_completion(cls, prompt: Array, tokens: Array, logprobs: Array, versions: Array) -> TokenSequence:
        """Build the sequence of a prompt and one completion that the policy sampled.

        Args:
            prompt: `[prompt_len] int32`.
            tokens: `[len] int32`, the completion.
            logprobs: `[len] float32`.
            versions: `[len] int32`.
        """
        before = len(prompt)
        return cls(
            np.concatenate([prompt, tokens]).astype(np.int32),
            np.arange(before + len(tokens)) >= before,
            np.concatenate([np.zeros(before, np.float32), logprobs]).astype(np.float32),
            np.concatenate([np.full(before, NOT_SAMPLED, np.int32), versions]).astype(np.int32),
        )

    @property
    def sampled(self) -> Array:
        """Which tokens a policy sampled, `[len] bool`."""
        found: Array = self.versions >= 0
        return found


@dataclass(frozen=True, slots=True)
class Sample:
    """One attempt at the prompt: a completion, or an episode with an environment.

    Attributes:
        sequences: one for a completion and wherever the history only grows; several where it branched.
        text: what the model wrote, decoded.
        finish_reason: why the sample ended.
        metrics: figures of the sample, such as turns, tool calls or the environment's reward.
    """

    sequences: tuple[TokenSequence, ...]
    text: str = ""
    finish_reason: str = FinishReason.STOP
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> Array:
        """Tokens that the policy sampled, of all sequences end to end, `[sampled] int32`."""
        return np.concatenate([s.token_ids[s.sampled] for s in self.sequences])

    @property
    def logprobs(self) -> Array:
        """Log-probs of `tokens`, `[sampled] float32`."""
        return np.concatenate([s.logprobs[s.sampled] for s in self.sequences])

    @property
    def versions(self) -> Array:
        """Versions that sampled `tokens`, `[sampled] int32`."""
        return np.concatenate([s.versions[s.sampled] for s in self.sequences])


def runs(flags: Array) -> Array:
    """Begin and end of each run of true values, `[runs, 2] int32`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2).astype(np.int32)
