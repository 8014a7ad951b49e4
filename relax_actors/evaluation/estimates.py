"""Estimates from the answers to held-out prompts, as pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

Z = 1.959963984540054
"""Quantile of the normal distribution for intervals of 95 %."""
Interval = tuple[float, float]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that one of k answers passes, given c of n.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374), equation 1.

    Args:
        n: number of answers to the prompt.
        c: number of those that pass, 0 to n.
        k: number of answers to draw, 1 to n.

    Raises:
        ValueError: a number is out of range.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        msg = f"n = {n}, c = {c}, k = {k}: need 0 <= c <= n and 1 <= k <= n"
        raise ValueError(msg)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(votes: Sequence[str], passed: Sequence[bool], k: int) -> float:
    """Return the probability that the most frequent of k answers passes.

    The mean over the groups of k consecutive answers that n answers have; answers that are left over do not count. Of
    several most frequent answers each is chosen with the same probability. Where equal answers have other rewards, the
    share of them that passes counts, so that majority@1 is the accuracy. Answers without a vote, which cannot be read,
    support no answer; a group of these alone counts by the share of them that passes.

    Args:
        votes: what each of the n answers says; empty if it cannot be read.
        passed: whether it passes.
        k: number of answers of a group, 1 to n.

    Raises:
        ValueError: k is out of range, or the numbers of votes and answers differ.
    """
    if len(votes) != len(passed) or not 1 <= k <= len(votes):
        msg = f"{len(votes)} votes, {len(passed)} answers, k = {k}: need equal numbers and 1 <= k <= n"
        raise ValueError(msg)
    groups = [_majority(votes[i : i + k], passed[i : i + k]) for i in range(0, len(votes) - k + 1, k)]
    return sum(groups) / len(groups)


def _majority(votes: Sequence[str], passed: Sequence[bool]) -> float:
    counts = Counter(filter(None, votes)) or Counter(votes)
    most = max(counts.values())
    chosen = {vote for vote, count in counts.items() if count == most}
    return sum(ok for vote, ok in zip(votes, passed, strict=True) if vote in chosen) / (most * len(chosen))


def wilson(share: float, n: int) -> Interval:
    """Return the 95 % score interval of a probability (Wilson 1927), within [0, 1].

    Args:
        share: share of n independent trials that succeeded; where a trial is a prompt with several answers, the mean of
            the prompts' probabilities, whose variance is at most that of single answers.
        n: number of trials, at least 1.

    Raises:
        ValueError: the share is not in [0, 1], or there is no trial.
    """
    if n < 1 or not 0 <= share <= 1:
        msg = f"share = {share}, n = {n}: need a share in [0, 1] and n >= 1"
        raise ValueError(msg)
    centre = share + Z * Z / (2 * n)
    spread = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    low = 0.0 if share == 0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if share == 1 else min(1.0, (centre + spread) / scale)
    return low, high


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of a mean by its standard error; None with fewer than two values."""
    n = len(values)
    if n < 2:  # noqa: PLR2004
        return None
    mean = sum(values) / n
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return mean - Z * error, mean + Z * error


def mcnemar(better: int, worse: int) -> float:
    """Return McNemar's exact two-sided p-value (1947), of prompts that changed sides.

    Args:
        better: prompts that pass in the second run only.
        worse: prompts that pass in the first run only.
    """
    n, fewer = better + worse, min(better, worse)
    # From the largest term on; each follows from the one before it.
    log_term = math.lgamma(n + 1) - math.lgamma(fewer + 1) - math.lgamma(n - fewer + 1) - n * math.log(2)
    term = tail = math.exp(log_term)
    for i in range(fewer, 0, -1):
        term *= i / (n - i + 1)
        tail += term
    return min(1.0, 2 * tail)
