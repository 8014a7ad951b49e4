"""Training batches for tests. All are made here, so that they follow the protocol of the engines in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.engines.protocols import Generation, GenerationRequest, TrainSample
from tests.support.models import ALPHABET

GROUP = 4
"""Samples of a row."""
Array = NDArray[Any]


def silent() -> None:
    """Report no progress."""


def completions_batch(
    prompts: Sequence[Array], completions: Sequence[Array], logprobs: Sequence[Array], advantages: Sequence[float]
) -> list[TrainSample]:
    """Give each completion one advantage for all of its tokens."""
    return [
        TrainSample.of_completion(p, c, logprobs=old, advantages=np.full(len(c), a, np.float32))
        for p, c, old, a in zip(prompts, completions, logprobs, advantages, strict=True)
    ]


def batch_of(seed: int, samples: int = 12) -> list[TrainSample]:
    """Draw sequences of various lengths, with log-probs near those of a uniform policy, in rows of `GROUP`.

    The sequences of a row share a prompt of 4 to 8 tokens.
    """
    random = np.random.default_rng(seed)

    def tokens(least: int, most: int) -> Any:
        return random.integers(0, len(ALPHABET), random.integers(least, most + 1)).astype(np.int32)

    prompts, completions = [tokens(4, 8) for _ in range(0, samples, GROUP)], [tokens(1, 12) for _ in range(samples)]
    prompts = [prompts[i // GROUP] for i in range(samples)]
    old = [(-np.log(len(ALPHABET)) + 0.1 * random.standard_normal(len(c))).astype(np.float32) for c in completions]
    advantages = random.standard_normal(samples).astype(np.float32)
    batch = completions_batch(prompts, completions, old, advantages.tolist())
    return [replace(sample, row=i // GROUP) for i, sample in enumerate(batch)]


def batch_of_generations(made: Sequence[tuple[GenerationRequest, Generation]]) -> list[TrainSample]:
    """Train on what an engine generated, with advantages from -1 to 1."""
    return completions_batch(
        [r.tokens for r, _ in made],
        [g.tokens for _, g in made],
        [g.logprobs for _, g in made],
        np.linspace(-1, 1, len(made)).astype(np.float32).tolist(),
    )


def batch_of_groups(groups: Sequence[Sequence[Generation]], requests: Sequence[GenerationRequest]) -> list[TrainSample]:
    """Train on the groups of samples that an engine generated for requests; each group is a row."""
    made = [(request, sample) for request, group in zip(requests, groups, strict=True) for sample in group]
    rows = [i for i, group in enumerate(groups) for _ in group]
    return [replace(sample, row=i) for sample, i in zip(batch_of_generations(made), rows, strict=True)]


def equal_sequences(seed: int, samples: int = 8) -> list[TrainSample]:
    """Take one sequence again and again, with other log-probs and advantages at each seed."""
    random = np.random.default_rng(seed)
    prompt, completion = np.array([1, 2, 10], np.int32), np.array([3, 4, 5, 11], np.int32)
    old = [random.uniform(-3, -1, len(completion)).astype(np.float32) for _ in range(samples)]
    advantages = random.normal(size=samples).astype(np.float32)
    return completions_batch([prompt] * samples, [completion] * samples, old, advantages.tolist())


def answers(prompts: Sequence[Array], completion: Sequence[int]) -> list[TrainSample]:
    """Answer every prompt with the same completion, for supervised steps."""
    return [TrainSample.of_completion(prompt, np.array(completion, np.int32)) for prompt in prompts]


def with_advantages(batch: Sequence[TrainSample], value: float) -> list[TrainSample]:
    """Give all tokens the same advantage."""
    return [sample.with_advantages(np.full(len(sample), value, np.float32)) for sample in batch]


def with_noise_outside_the_mask(batch: Sequence[TrainSample], seed: int) -> list[TrainSample]:
    """Draw other log-probs and advantages for the tokens that are not trained."""
    random = np.random.default_rng(seed)

    def noisy(sample: TrainSample, name: str) -> Array:
        noise = random.standard_normal(len(sample)).astype(np.float32)
        return np.where(sample.loss_mask, getattr(sample, name), noise)

    return [replace(s, logprobs=noisy(s, "logprobs"), advantages=noisy(s, "advantages")) for s in batch]


def parts_of(batch: Sequence[TrainSample]) -> list[list[TrainSample]]:
    """Cut a batch of `batch_of` into its rows."""
    return [list(batch[i : i + GROUP]) for i in range(0, len(batch), GROUP)]


def scored_by(batch: Sequence[TrainSample], scored: Sequence[Array], name: str = "logprobs") -> list[TrainSample]:
    """Put log-probs that an engine scored, `[len] float32` each, into a batch."""
    return [replace(sample, **{name: logprobs}) for sample, logprobs in zip(batch, scored, strict=True)]


def routed(batch: Sequence[TrainSample], seed: int, moe: dict[str, Any], missing: float = 0.2) -> list[TrainSample]:
    """Draw experts of an architecture for the tokens of a batch, in no order; none for a share of the tokens."""
    random = np.random.default_rng(seed)
    layers, experts, top_k = moe["num_hidden_layers"], moe["num_experts"], moe["num_experts_per_tok"]

    def drawn(tokens: int) -> Any:
        every = np.broadcast_to(np.arange(experts, dtype=np.int16), (tokens, layers, experts))
        chosen = random.permuted(every, axis=-1)[..., :top_k]
        return np.where(random.random((tokens, 1, 1)) < missing, np.int16(-1), chosen)

    return [replace(sample, routed_experts=drawn(len(sample) - 1)) for sample in batch]


def observing(sample: TrainSample) -> TrainSample:
    """Train every other token that follows a trained one and is not trained itself, as an observation."""
    mask = sample.loss_mask
    observed = ~mask & (np.cumsum(mask) > 0) & (np.arange(len(mask)) % 2 == 0)
    count = sample.sample_tokens or sample.trained
    return replace(sample, loss_mask=mask | observed, observed=observed, sample_tokens=count)


def two_rows() -> list[TrainSample]:
    """Draw 6 sequences with random masks in 2 rows; the first sample of each row has two sequences."""
    random, found = np.random.default_rng(1), []
    for i, length in enumerate((9, 14, 6, 11, 8, 12)):
        mask = random.random(length) < 0.5
        mask[0], mask[-1] = False, True
        found.append(
            TrainSample(
                random.integers(0, 12, length).astype(np.int32),
                mask,
                logprobs=random.uniform(-3, -1.5, length).astype(np.float32),
                advantages=np.full(length, random.normal(), np.float32),
                reference_logprobs=random.uniform(-3, -2, length).astype(np.float32),
                row=i // 3,
                sample=max(0, i % 3 - 1),
            )
        )
    for i in (1, 4):  # one advantage a sample
        found[i] = found[i].with_advantages(np.full(len(found[i]), found[i - 1].advantages[0]))
    tokens, rows = {(s.row, s.sample): 0 for s in found}, {s.row: 0 for s in found}
    for s in found:
        tokens[s.row, s.sample] += s.trained
        rows[s.row] += s.trained
    return [replace(s, sample_tokens=tokens[s.row, s.sample], row_tokens=rows[s.row]) for s in found]


def valued(batch: Sequence[TrainSample], seed: int) -> list[TrainSample]:
    """Draw values and returns for the tokens of a batch."""
    random = np.random.default_rng(seed)

    def drawn(sample: TrainSample) -> Array:
        return random.standard_normal(len(sample)).astype(np.float32)

    return [replace(sample, values=0.1 * drawn(sample), returns=drawn(sample)) for sample in batch]
