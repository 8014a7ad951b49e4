"""How answers are sampled: training rows by [rollout], held-out rows by their set of [eval]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.engines.protocols import GenerationRequest, StopStrings


@dataclass(frozen=True, slots=True)
class Sampling:
    """Samples of a row, and how they are drawn.

    Attributes:
        samples: number of samples, greedy ones included.
        greedy_samples: how many of them, the last ones, choose the most likely tokens.
        temperature: divisor of the logits; log-probs of greedy samples have it, too.
        top_p: probability mass to sample from.
        max_tokens: largest number of tokens of a sample, or of its turn.
    """

    samples: int
    greedy_samples: int
    temperature: float
    top_p: float
    max_tokens: int

    def is_greedy(self, sample: int) -> bool:
        """Whether a sample, by its index, chooses the most likely tokens."""
        return sample >= self.samples - self.greedy_samples


def sampling_of(config: Config, row: RowId, baselines: int = 0) -> Sampling:
    """Return how a row is sampled; a training row gets `baselines` greedy samples more (ReMax).

    Raises:
        RowError: the row is held out, and no set of [eval] has it.
    """
    own, usual = config.held_out(row), config.rollout
    if own is None:
        samples = usual.group_size + baselines
        return Sampling(samples, baselines, usual.temperature, usual.top_p, usual.max_tokens)
    most = own.max_tokens or usual.max_tokens
    if own.temperature == 0:
        return Sampling(1, 1, usual.temperature, usual.top_p, most)
    return Sampling(own.samples, 0, own.temperature, own.top_p, most)


def template_of(
    config: Config, sampling: Sampling, stop_ids: frozenset[int], stop_strings: StopStrings | None
) -> GenerationRequest:
    """Return the settings of the requests of rows; prompt and seed are those of each row."""
    return GenerationRequest(
        tokens=np.zeros(0, np.int32),
        seed=0,
        samples=sampling.samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        stop_ids=stop_ids,
        greedy_samples=sampling.greedy_samples,
        min_tokens=min(config.rollout.min_tokens, sampling.max_tokens),
        stop_strings=stop_strings,
    )
