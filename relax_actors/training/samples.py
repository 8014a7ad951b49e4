"""Conversion of a row's cells to the samples that engines train on or score."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from broker.codec import Array
from relax_actors.engines.protocols import TrainSample
from relax_actors.messages import Advantage, Trajectory

PROXIMAL, REFERENCE = "actor_fwd", "reference"
"""Columns of log-probs, `[total] float32`: of the proximal policy, and of the reference model of the KL."""
_FIELDS = {PROXIMAL: "proximal_logprobs", REFERENCE: "reference_logprobs"}


def token_advantages(advantage: Advantage, trajectory: Trajectory) -> Array:
    """Return the advantage of every token of a row, `[total] float32`."""
    values = np.asarray(advantage.values, np.float32)
    return values if len(values) == len(trajectory.token_ids) else np.repeat(values, trajectory.sample_lengths)


def samples_of(
    row: int,
    trajectory: Trajectory,
    advantage: Advantage | None = None,
    scores: Mapping[str, Array] | None = None,
    *,
    replays: bool = False,
) -> list[TrainSample]:
    """Convert a row to samples: one for each sequence with trained tokens.

    Args:
        row: index of the row within its step.
        trajectory: samples of the row.
        advantage: advantages and returns of the row; None if the row is only scored.
        scores: log-probs of the row, `[total] float32`, by column.
        replays: whether engines compute with the recorded experts.
    """
    flat = {_FIELDS[name]: array for name, array in (scores or {}).items()}
    if advantage is not None:
        flat["advantages"] = token_advantages(advantage, trajectory)
        if advantage.returns is not None:
            flat["returns"] = advantage.returns
    bounds = np.concatenate([[0], np.cumsum(trajectory.trained)])
    ends = np.concatenate([[0], np.cumsum(trajectory.sample_lengths)])
    trained = np.repeat(np.diff(bounds[ends]), trajectory.counts).tolist()
    found, start = [], 0
    sequences = trajectory.iter_sequences(spans=False, experts=replays)
    for sequence, own, tokens in zip(sequences, trajectory.lengths.tolist(), trained, strict=True):
        part, prompt_length = slice(start, start + own), len(sequence.token_ids) - own
        start += own
        if not sequence.loss_mask.any():
            continue
        found.append(
            TrainSample(
                sequence.token_ids,
                sequence.loss_mask,
                sequence.logprobs,
                sequence.versions,
                **{name: _pad_prompt(prompt_length, array[part]) for name, array in flat.items()},
                routed_experts=sequence.routed_experts,
                row=row,
                sample_tokens=tokens,
            )
        )
    return found


def _pad_prompt(prompt_length: int, own: Array) -> Array:
    """Extend an array over a sequence's own tokens to its whole length, with 0 for the prompt."""
    return np.concatenate([np.zeros(prompt_length, own.dtype), own])
