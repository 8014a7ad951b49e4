"""Training batches shaped like multi-turn episodes: masks with holes and several sequences a sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.engines.protocols import TrainSample

ALPHABET = 12
"""Tokens of the tiny models' vocabulary."""
IGNORED = 77.0
"""Value of per-token arrays where the mask is false; it would change every loss that reads it."""


def episode_batch(seed: int, samples: int = 6) -> list[TrainSample]:
    """Draw samples of one to three sequences with one to three turns, in rows of two samples.

    Each token has an advantage of its own. The batch contains one sequence without trained tokens.
    """
    random = np.random.default_rng(seed)
    batch: list[TrainSample] = []
    for index in range(samples):
        sequences = [_sequence(random, turns=int(random.integers(1, 4))) for _ in range(random.integers(1, 4))]
        if index == 0:
            sequences.append(_sequence(random, turns=0))
        total = sum(sequence.trained for sequence in sequences)
        batch += [replace(sequence, row=index // 2, sample_tokens=total) for sequence in sequences]
    return batch


def _sequence(random: np.random.Generator, turns: int) -> TrainSample:
    """A prompt, then turns of trained tokens, each followed by an observation of zero to three tokens."""
    spans = [(False, int(random.integers(1, 7)))]
    for _ in range(turns):
        spans += [(True, int(random.integers(1, 6))), (False, int(random.integers(0, 4)))]
    mask = np.concatenate([np.full(length, trained) for trained, length in spans])

    def masked(values: NDArray[Any]) -> NDArray[Any]:
        return np.where(mask, values, IGNORED).astype(np.float32)

    length = len(mask)
    return TrainSample(
        random.integers(0, ALPHABET, length).astype(np.int32),
        mask,
        logprobs=masked(-np.log(ALPHABET) + 0.1 * random.standard_normal(length)),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=masked(random.standard_normal(length)),
    )
