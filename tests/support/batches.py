"""Training batches for tests. All are made here, so that they follow the protocol of the engines in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.engines.protocols import Generation, GenerationRequest, Sequences, TrainBatch
from tests.support.models import ALPHABET

GROUP = 4
"""Samples of a row."""


def batch_of(seed: int, samples: int = 12) -> TrainBatch:
    """Draw sequences of various lengths, with log-probs near those of a uniform policy."""
    random = np.random.default_rng(seed)

    def tokens(most: int) -> Any:
        return random.integers(0, len(ALPHABET), random.integers(1, most + 1)).astype(np.int32)

    sequences = Sequences([tokens(6) for _ in range(samples)], [tokens(12) for _ in range(samples)])
    old = [
        (-np.log(len(ALPHABET)) + 0.1 * random.standard_normal(len(c))).astype(np.float32)
        for c in sequences.completions
    ]
    advantages = random.standard_normal(samples).astype(np.float32)
    return TrainBatch(sequences, old, advantages, samples=[GROUP] * (samples // GROUP))


def batch_of_generations(made: Sequence[tuple[GenerationRequest, Generation]]) -> TrainBatch:
    """Train on what an engine generated, with advantages from -1 to 1."""
    sequences = Sequences([r.tokens for r, _ in made], [g.tokens for _, g in made])
    advantages = np.linspace(-1, 1, len(made)).astype(np.float32)
    return TrainBatch(sequences, [g.logprobs for _, g in made], advantages)


def equal_sequences(seed: int, samples: int = 8) -> TrainBatch:
    """Take one sequence again and again, with other log-probs and advantages at each seed."""
    random = np.random.default_rng(seed)
    prompt, completion = np.array([1, 2, 10], np.int32), np.array([3, 4, 5, 11], np.int32)
    old = [random.uniform(-3, -1, len(completion)).astype(np.float32) for _ in range(samples)]
    advantages = random.normal(size=samples).astype(np.float32)
    return TrainBatch(Sequences([prompt] * samples, [completion] * samples), old, advantages)


def answers(prompts: Sequence[NDArray[Any]], completion: Sequence[int]) -> Sequences:
    """Answer every prompt with the same completion, for supervised steps."""
    return Sequences(list(prompts), [np.array(completion, np.int32)] * len(prompts))


def with_advantages(batch: TrainBatch, value: float) -> TrainBatch:
    """Give all samples the same advantage."""
    return replace(batch, advantages=np.full_like(batch.advantages, value))


def with_longer_completions(batch: TrainBatch, times: int) -> TrainBatch:
    """Repeat every token of the completions."""
    longer = [c.repeat(times) for c in batch.sequences.completions]
    return TrainBatch(Sequences(batch.sequences.prompts, longer), [c * -1.0 for c in longer], batch.advantages)


def parts_of(batch: TrainBatch) -> list[TrainBatch]:
    """Cut a batch of `batch_of` into its rows."""
    cut = batch.sequences.cut(batch.samples)
    starts = np.cumsum([0, *batch.samples]).tolist()
    return [
        TrainBatch(part, batch.old_logprobs[a:b], batch.advantages[a:b], samples=[b - a])
        for part, a, b in zip(cut, starts, starts[1:], strict=False)
    ]


def routed(batch: TrainBatch, seed: int, moe: dict[str, Any], missing: float = 0.2) -> TrainBatch:
    """Draw experts of an architecture for the tokens of a batch, in no order; none for a share of the tokens."""
    random = np.random.default_rng(seed)
    layers, experts, top_k = moe["num_hidden_layers"], moe["num_experts"], moe["num_experts_per_tok"]

    def drawn(tokens: int) -> Any:
        every = np.broadcast_to(np.arange(experts, dtype=np.int16), (tokens, layers, experts))
        chosen = random.permuted(every, axis=-1)[..., :top_k]
        return np.where(random.random((tokens, 1, 1)) < missing, np.int16(-1), chosen)

    sequences = batch.sequences
    recorded = [drawn(length - 1) for length in sequences.lengths]
    return replace(batch, sequences=replace(sequences, experts=recorded))
