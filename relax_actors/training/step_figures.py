"""Figures of a step's samples, with which `relax doctor` finds silent mistakes.

All are computed from what the trainer has read anyway. Texts are looked at up to `MAX_TEXTS` samples of a step, so that
the time is bounded whatever the size of the step.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise

import numpy as np

from broker.codec import Array
from relax_actors.messages import Advantage, FinishReason, Trajectory

MAX_TEXTS = 32
"""Texts of a step that are searched; those of the first rows."""
WINDOW, STRIDE, MAX_WINDOWS = 10_000, 5_000, 8
"""Characters of a window of text that is compressed, between two windows, and windows of a text."""
RATIO = 10.0
"""Compression from which a window is repetitive."""
GRAM, SHORTEST, FEW_DISTINCT = 4, 64, 0.2
"""Tokens of an n-gram; a sample of at least `SHORTEST` tokens with a smaller share of distinct ones is repetitive."""
MARKS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|start_header_id|>", "<end_of_turn>", "[/INST]")
"""Marks of chat templates, which a completion that ends at the right token does not spell."""


def step_figures(trajectories: Sequence[Trajectory], advantages: Sequence[Advantage]) -> dict[str, float]:
    """Compute the figures of the samples of a step.

    - `length_mean`, `length_max`: own tokens of a sample.
    - `truncated`: share of samples that ended at a limit of tokens.
    - `no_signal`: share of rows whose advantages are all equal, so that they train nothing.
    - `length_better`, `length_worse`: mean length of samples with an advantage above and below that of their row.
    - `end_share`: share of the most frequent last token among samples that stopped by themselves.
    - `end_trained`: share of these samples whose last token is trained.
    - `distinct`: distinct token sequences of a row over its samples, mean over rows.
    - `repetitive`, `marked`: share of the texts that repeat themselves, and that spell a mark of a chat template.
    - `prompt_doubled`: share of rows whose prompt begins with the same token twice.
    """
    reasons = [reason for t in trajectories for reason in t.finish_reasons]
    cut = sum(reason in (FinishReason.LENGTH, FinishReason.TOKEN_BUDGET) for reason in reasons)
    by_row = [t.sample_lengths for t in trajectories]
    lengths = np.concatenate(by_row)
    tokens = np.concatenate([t.token_ids for t in trajectories])
    ends = np.cumsum(lengths)
    bounds = [0, *ends.tolist()]
    samples = [tokens[begin:end] for begin, end in pairwise(bounds)]
    figures = {
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated": cut / len(reasons),
        "no_signal": sum(bool((a.values == a.values[0]).all()) for a in advantages) / len(advantages),
        "distinct": _distinct([len(t.texts) for t in trajectories], samples),
        "prompt_doubled": sum(_is_doubled(t) for t in trajectories) / len(trajectories),
    }
    figures |= _lengths_by_advantage(by_row, advantages)
    figures |= _ends(trajectories, reasons, tokens, ends, lengths)
    figures |= _texts(trajectories, samples)
    return {name: round(value, 4) for name, value in figures.items()}


def _is_doubled(trajectory: Trajectory) -> bool:
    prompt = trajectory.prompt_tokens
    return len(prompt) > 1 and bool(prompt[0] == prompt[1])


def _distinct(sizes: Sequence[int], samples: Sequence[Array]) -> float:
    """Return the mean over rows, of `sizes` samples each, of the share of distinct samples."""
    each = iter(samples)
    return sum(len({sample.tobytes() for sample in islice(each, size)}) / size for size in sizes) / len(sizes)


def _lengths_by_advantage(by_row: Sequence[Array], advantages: Sequence[Advantage]) -> dict[str, float]:
    rows = [
        (lengths, advantage.values - advantage.values.mean(dtype=np.float64))
        for lengths, advantage in zip(by_row, advantages, strict=True)
        if not advantage.per_token and len(advantage.values) == len(lengths)
    ]
    if not rows:
        return {}
    lengths, above = np.concatenate([own for own, _ in rows]), np.concatenate([own for _, own in rows])
    better, worse = lengths[above > 0], lengths[above < 0]
    if not len(better) or not len(worse):
        return {}
    return {"length_better": float(better.mean()), "length_worse": float(worse.mean())}


def _ends(
    trajectories: Sequence[Trajectory], reasons: Sequence[str], tokens: Array, ends: Array, lengths: Array
) -> dict[str, float]:
    """Look at the last tokens of samples that stopped by themselves and have a trained token."""
    trained = np.concatenate([t.trained for t in trajectories])
    so_far = np.concatenate([[0], np.cumsum(trained)])
    stopped = np.fromiter((reason == FinishReason.STOP for reason in reasons), np.bool_, len(reasons))
    last = ends[stopped & (so_far[ends] > so_far[ends - lengths])] - 1
    if not len(last):
        return {}
    most = Counter(tokens[last].tolist()).most_common(1)[0][1]
    return {"end_share": most / len(last), "end_trained": float(trained[last].mean())}


def _texts(trajectories: Sequence[Trajectory], samples: Sequence[Array]) -> dict[str, float]:
    texts = list(islice((text for t in trajectories for text in t.texts), MAX_TEXTS))
    if not texts:
        return {}
    repetitive = sum(is_repetitive(text) or has_few_grams(own) for text, own in zip(texts, samples, strict=False))
    marked = sum(any(mark in text for mark in MARKS) for text in texts)
    return {"repetitive": repetitive / len(texts), "marked": marked / len(texts)}


def is_repetitive(text: str) -> bool:
    """Whether a window of `WINDOW` characters compresses to less than a tenth."""
    windows = (text[i : i + WINDOW].encode() for i in range(0, len(text) - WINDOW + 1, STRIDE))
    return any(
        len(window) > RATIO * len(zlib.compress(window, 9))
        for window, _ in zip(windows, range(MAX_WINDOWS), strict=False)
    )


def has_few_grams(tokens: Array) -> bool:
    """Whether few of the n-grams of a sample, `[len] int32`, are distinct."""
    if len(tokens) < SHORTEST:
        return False
    # Four tokens are packed in 64 bits; those of a large vocabulary are numbered anew within the sample.
    ids = tokens.astype(np.uint64)
    if ids.max() >= 1 << 16:
        ids = np.unique(ids, return_inverse=True)[1].astype(np.uint64)
    count = len(ids) - GRAM + 1
    grams = np.zeros(count, np.uint64)
    for k in range(GRAM):
        grams = grams << np.uint64(16) | ids[k : k + count]
    return len(np.unique(grams)) < FEW_DISTINCT * count
