"""Figures of the samples of a step, by which `relax doctor` finds mistakes that raise no error.

All are computed from what the trainer has read anyway. Texts are looked at up to `MAX_TEXTS` samples of a step, so that
the time is bounded whatever the size of the step.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

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

    Args:
        trajectories: samples of each row.
        advantages: advantages of each row.
    """
    lengths = np.concatenate([t.sample_lengths for t in trajectories])
    reasons = [reason for t in trajectories for reason in t.finish_reasons]
    cut = sum(reason in (FinishReason.LENGTH, FinishReason.TOKEN_BUDGET) for reason in reasons)
    figures = {
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated": cut / len(reasons),
        "no_signal": sum(float(np.ptp(a.values)) == 0.0 for a in advantages) / len(advantages),
        "distinct": sum(map(_distinct, trajectories)) / len(trajectories),
        "prompt_doubled": sum(_is_doubled(t) for t in trajectories) / len(trajectories),
    }
    figures |= _lengths_by_advantage(trajectories, advantages) | _ends(trajectories) | _texts(trajectories)
    return {name: round(value, 4) for name, value in figures.items()}


def _is_doubled(trajectory: Trajectory) -> bool:
    prompt = trajectory.prompt_tokens
    return len(prompt) > 1 and bool(prompt[0] == prompt[1])


def _own_tokens(trajectory: Trajectory) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each sample among the `total` tokens."""
    ends = np.cumsum(trajectory.sample_lengths).tolist()
    yield from zip([0, *ends[:-1]], ends, strict=True)


def _distinct(trajectory: Trajectory) -> float:
    ids = np.ascontiguousarray(trajectory.token_ids)
    return len({ids[begin:end].tobytes() for begin, end in _own_tokens(trajectory)}) / len(trajectory.texts)


def _lengths_by_advantage(trajectories: Sequence[Trajectory], advantages: Sequence[Advantage]) -> dict[str, float]:
    better: list[float] = []
    worse: list[float] = []
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        lengths = trajectory.sample_lengths
        if advantage.per_token or len(advantage.values) != len(lengths):
            continue
        middle = float(np.mean(advantage.values))
        better += lengths[advantage.values > middle].tolist()
        worse += lengths[advantage.values < middle].tolist()
    if not better or not worse:
        return {}
    return {"length_better": float(np.mean(better)), "length_worse": float(np.mean(worse))}


def _ends(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    last: list[int] = []
    trained = 0
    for trajectory in trajectories:
        mask = trajectory.trained
        for (begin, end), reason in zip(_own_tokens(trajectory), trajectory.finish_reasons, strict=True):
            if reason == FinishReason.STOP and end > begin and bool(mask[begin:end].any()):
                last.append(int(trajectory.token_ids[end - 1]))
                trained += bool(mask[end - 1])
    if not last:
        return {}
    return {"end_share": Counter(last).most_common(1)[0][1] / len(last), "end_trained": trained / len(last)}


def _texts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    looked = repetitive = marked = 0
    for trajectory in trajectories:
        for text, (begin, end) in zip(trajectory.texts, _own_tokens(trajectory), strict=True):
            if looked == MAX_TEXTS:
                break
            looked += 1
            repetitive += is_repetitive(text) or has_few_grams(trajectory.token_ids[begin:end].tolist())
            marked += any(mark in text for mark in MARKS)
    return {"repetitive": repetitive / looked, "marked": marked / looked} if looked else {}


def is_repetitive(text: str) -> bool:
    """Whether a window of a text of at least `WINDOW` characters shrinks to less than a tenth when compressed."""
    windows = (text[i : i + WINDOW].encode() for i in range(0, len(text) - WINDOW + 1, STRIDE))
    return any(
        len(window) > RATIO * len(zlib.compress(window, 9))
        for window, _ in zip(windows, range(MAX_WINDOWS), strict=False)
    )


def has_few_grams(tokens: Sequence[int]) -> bool:
    """Whether few of the n-grams of a sample are distinct."""
    if len(tokens) < SHORTEST:
        return False
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return len(set(grams)) < FEW_DISTINCT * len(grams)
