"""Steps with random rows, targets and signals of teachers, cut into micro-batches in several ways."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from relax_actors.engines.protocols import TrainSample
from tests.support.batches import observing, two_rows

TOP_K = 3
"""Most likely tokens of the teacher at each token."""
MICRO_BATCHES = 3
"""Largest number of micro-batches of a rank."""


@dataclass(frozen=True)
class Step:
    """A step, how it is cut into micro-batches and parts, and how ranks share it.

    Attributes:
        sequences: number of trained tokens of the sequences of each sample of each row; empty for those of `two_rows`.
        seed: of the numbers.
        budget: tokens of a micro-batch.
        by_row: whether the engine gets row after row.
        places: rank and micro-batch of each sequence, chosen by taking each number modulo the possible places.
        ranks: number of ranks.
    """

    sequences: tuple[tuple[tuple[int, ...], ...], ...]
    seed: int
    budget: int
    by_row: bool
    places: tuple[int, ...]
    ranks: int

    def samples(self) -> list[TrainSample]:
        if not self.sequences:
            return taught(two_rows(), self.seed)
        random, found = np.random.default_rng(self.seed), []
        for row, samples in enumerate(self.sequences):
            row_tokens = sum(sum(lengths) for lengths in samples)
            for sample, lengths in enumerate(samples):
                advantage = random.normal()
                own = [drawn(random, n, advantage, row, sample, sum(lengths)) for n in lengths]
                found += [replace(sequence, row_tokens=row_tokens) for sequence in own]
        return taught(found, self.seed)

    def shares(self) -> list[list[list[int]]]:
        """Sequences of each micro-batch of each rank."""
        found: list[list[list[int]]] = [[[] for _ in range(MICRO_BATCHES)] for _ in range(self.ranks)]
        for index in range(len(self.samples())):
            place = self.places[index % len(self.places)] % (self.ranks * MICRO_BATCHES)
            found[place // MICRO_BATCHES][place % MICRO_BATCHES].append(index)
        return [[one for one in micro_batches if one] for micro_batches in found]


def drawn(
    random: np.random.Generator, trained: int, advantage: float, row: int, sample: int, sample_tokens: int
) -> TrainSample:
    """Draw a sequence with tokens that are not trained before and between the trained ones."""
    length = 1 + trained + int(random.integers(0, 4))
    mask = np.zeros(length, np.bool_)
    mask[1 + random.choice(length - 1, trained, replace=False)] = True
    return TrainSample(
        random.integers(0, 12, length).astype(np.int32),
        mask,
        logprobs=random.uniform(-3, -1.5, length).astype(np.float32),
        advantages=np.full(length, advantage, np.float32),
        reference_logprobs=random.uniform(-3, -2, length).astype(np.float32),
        row=row,
        sample=sample,
        sample_tokens=sample_tokens,
    )


def taught(samples: list[TrainSample], seed: int) -> list[TrainSample]:
    """Add the log-probs of a teacher at every token."""
    random, found = np.random.default_rng(seed + 1), []
    for sample in samples:
        length = len(sample)
        top = -np.sort(-random.normal(size=(length, 12)) * 2, -1)
        top -= np.log(np.exp(top).sum(-1, keepdims=True))
        found.append(
            replace(
                sample,
                imitated=np.full(length, random.uniform(0, 2), np.float32),
                teacher_logprobs=random.uniform(-3, -1, length).astype(np.float32),
                teacher_top_ids=np.argsort(random.random((length, 12)))[:, :TOP_K].astype(np.int32),
                teacher_top_logprobs=top[:, :TOP_K].astype(np.float32),
            )
        )
    return found


def labelled(samples: list[TrainSample], chosen: dict[str, Any]) -> list[TrainSample]:
    """Add what a loss of scores compares them with, classes or margins, or tokens of observations to each sequence."""
    if chosen.get("observation_nll"):
        return [observing(sample) for sample in samples]
    if chosen.get("head") != "scores":
        return samples
    return [replace(sample, targets=(np.arange(len(sample)) % 2).astype(np.float32)) for sample in samples]


TWO_ROWS = Step((), 1, 14, by_row=True, places=(0, 3, 4, 1, 3, 0), ranks=2)
"""The step of `two_rows`: each sequence in a micro-batch of its own, those of each sample on different ranks."""
STEPS = st.builds(
    Step,
    st.lists(
        st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=2).map(tuple), min_size=1, max_size=3).map(tuple),
        min_size=1,
        max_size=3,
    ).map(tuple),
    st.integers(0, 2**16),
    st.integers(12, 60),
    st.booleans(),
    st.lists(st.integers(0, 8), min_size=1, max_size=7).map(tuple),
    st.integers(1, 3),
)
