"""Samples of several turns: a conversation with a tool, and one whose history was compacted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors import NOT_SAMPLED, FinishReason, Sample, TokenSequence, Trajectory


@dataclass(frozen=True)
class Part:
    """Tokens that the policy sampled, with their log-probs, or tokens that it only read.

    Attributes:
        token_ids: `[len] int32`.
        logprobs: `[len] float32` where the policy sampled the tokens, else None.
        version: version of the weights that sampled them.
    """

    token_ids: NDArray[Any]
    logprobs: NDArray[Any] | None = None
    version: int = NOT_SAMPLED


def sequence_of(parts: Sequence[Part]) -> TokenSequence:
    """Lay parts end to end. Only sampled tokens are trained."""
    sampled = np.concatenate([np.full(len(part.token_ids), part.logprobs is not None) for part in parts])
    zeros = (np.zeros(len(part.token_ids), np.float32) for part in parts)
    return TokenSequence(
        token_ids=np.concatenate([part.token_ids for part in parts]).astype(np.int32),
        loss_mask=sampled,
        logprobs=np.concatenate([z if p.logprobs is None else p.logprobs for p, z in zip(parts, zeros, strict=True)]),
        versions=np.concatenate([np.full(len(part.token_ids), part.version, np.int32) for part in parts]),
    )


def trajectory_of(prompt: Part, call: Part, result: Part, answer: Part, summary: Part) -> Trajectory:
    """Build a row of two samples.

    The first one is a conversation: prompt, tool call, result of the tool, answer. Its history only grows, so it is one
    sequence. The second one answers from a summary of its history, so it has two sequences.
    """
    conversation = Sample((sequence_of([prompt, call, result, answer]),), metrics={"turns": 2})
    branches = (sequence_of([prompt, call, result]), sequence_of([prompt, summary, answer]))
    compacted = Sample(branches, finish_reason=FinishReason.LENGTH, metrics={"turns": 2})
    return Trajectory.of(prompt.token_ids, [conversation, compacted])
