r"""Normalisation of advantages by statistics of the step, in the trainer.

Computed in float64 over the rows in the order of the batch cell, in one process before the batch is shared by ranks. A
replayed step therefore gives the same bits, and so does any number of ranks. The result is rounded to float32 once.

Only samples with a trained token count, weighted by 1 ("samples") or by their trained tokens ("tokens"). Standard
deviations have divisor n - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Whiten = Literal["none", "tokens", "samples"]
WHITEN_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAdvantages:
    """Advantages of one row of a step.

    Attributes:
        values: `[n] float64`, one for each sample, or `[total]`, one for each own token.
        lengths: `[n] int64`, own tokens of each sample.
        mask: `[total] bool`, trained tokens.
        rewards: `[n] float64`, rewards of the samples; read by `scale_by_reward_std` and `scale_by_signal`.
        role: role that the samples play; read by `subtract_running_means`.
        is_per_token: whether `values` has one number for each token where a row has as many tokens as samples.
    """

    values: Array
    lengths: Array
    mask: Array
    rewards: Array | None = None
    role: str = ""
    is_per_token: bool = False

    @property
    def per_token(self) -> bool:
        """Whether `values` has one number for each token."""
        return len(self.values) != len(self.lengths) or (self.is_per_token and len(self.values) == len(self.mask))

    @property
    def trained_lengths(self) -> Array:
        """Trained tokens of each sample, `[n] int64`."""
        of_token = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return np.bincount(of_token[self.mask], minlength=len(self.lengths))

    @property
    def counted(self) -> Array:
        """Samples with a trained token, `[n] bool`."""
        has_tokens: Array = self.trained_lengths > 0
        return has_tokens


def whiten(rows: Sequence[RowAdvantages], *, over: Whiten, epsilon: float = WHITEN_EPSILON) -> list[RowAdvantages]:
    r"""Whiten the advantages of a step: $\frac{A - \operatorname{mean}(A)}{\operatorname{std}(A) + \epsilon}$.

    Over tokens: REINFORCE++ (arXiv 2501.03262). Over samples: the last step of GDPO (arXiv 2601.05242). Equal
    advantages become exactly 0. Masked tokens, and samples without a trained token, become 0.

    Args:
        rows: the rows of the step.
        over: "none" changes nothing.
        epsilon: added to the standard deviation.

    Raises:
        ValueError: `over` is "samples", and a row has advantages of tokens.
    """
    if over == "none" or not rows:
        return list(rows)
    if over == "samples" and any(row.per_token for row in rows):
        msg = 'advantages of tokens cannot be whitened over samples; set algorithm.whiten = "tokens" or "none"'
        raise ValueError(msg)
    numbers, weights = zip(*(_weighted(row, over) for row in rows), strict=True)
    mean, deviation = _moments(np.concatenate(numbers), np.concatenate(weights))
    whitened = []
    for row in rows:
        kept = row.mask if row.per_token else row.counted
        values = (row.values - mean) / (deviation + epsilon) if deviation else np.zeros(len(row.values))
        whitened.append(replace(row, values=np.where(kept, values, 0.0)))
    return whitened


def scale_by_reward_std(rows: Sequence[RowAdvantages], *, epsilon: float = 1e-6) -> list[RowAdvantages]:
    r"""Divide by the standard deviation of all rewards of the step plus epsilon (Lite PPO, arXiv 2508.08221).

    A = (r - mean of the group) / (std of the step + epsilon); the group's mean was subtracted before. If all rewards of
    the step are equal, nothing changes.

    Args:
        rows: the rows of the step, with `rewards`.
        epsilon: added to the standard deviation.

    Raises:
        ValueError: a row has no rewards.
    """
    rewards = np.concatenate([_rewards(row)[row.counted] for row in rows]) if rows else np.zeros(0)
    _, deviation = _moments(rewards, np.ones(len(rewards)))
    scale = 1.0 / (deviation + epsilon) if deviation else 1.0
    return [replace(row, values=row.values * scale) for row in rows]


def scale_by_signal(rows: Sequence[RowAdvantages]) -> list[RowAdvantages]:
    r"""Multiply by B / (B - M): GPG's correction for samples without gradient (arXiv 2504.02546).

    B is the number of samples of the step, M of those in groups whose rewards are all equal. verl divides by the
    samples with a reward other than 0 instead. If no group has a signal, nothing changes.

    Args:
        rows: the rows of the step, with `rewards`.

    Raises:
        ValueError: a row has no rewards.
    """
    samples = [int(np.count_nonzero(row.counted)) for row in rows]
    signal = sum(n for n, row in zip(samples, rows, strict=True) if n and np.ptp(_rewards(row)[row.counted]) > 0)
    alpha = sum(samples) / signal if signal else 1.0
    return [replace(row, values=row.values * alpha) for row in rows]


def subtract_running_means(
    rows: Sequence[RowAdvantages], means: Mapping[str, float], *, decay: float = 0.95
) -> tuple[list[RowAdvantages], dict[str, float]]:
    r"""Subtract the running mean reward of each role: role-conditioned advantages (SPIRAL, arXiv 2506.24119).

    $A_i = r_i - b_\text{role}$, then $b_\text{role} \leftarrow \alpha b_\text{role} + (1 - \alpha) r_i$, sample by
    sample in the order of the rows; b starts at 0. The means after the step are part of the state of the trainer.

    Args:
        rows: the rows of the step, with `rewards`.
        means: running means before the step, by role.
        decay: alpha.

    Returns:
        The rows, and the running means after the step.

    Raises:
        ValueError: a row has no rewards.
    """
    after, shifted = dict(means), []
    for row in rows:
        baselines = np.zeros(len(row.lengths))
        for i in np.flatnonzero(row.counted):
            baselines[i] = after.get(row.role, 0.0)
            after[row.role] = decay * baselines[i] + (1.0 - decay) * float(_rewards(row)[i])
        spread = np.repeat(baselines, row.lengths) if row.per_token else baselines
        shifted.append(replace(row, values=row.values - spread))
    return shifted, after


def _weighted(row: RowAdvantages, over: Whiten) -> tuple[Array, Array]:
    """Return the numbers of a row that count, and the weight of each."""
    if row.per_token:
        masked = row.values[row.mask]
        return masked, np.ones(len(masked))
    counted = row.counted
    weights = row.trained_lengths if over == "tokens" else np.ones(len(counted))
    return row.values[counted], np.asarray(weights, np.float64)[counted]


def _moments(numbers: Array, weights: Array) -> tuple[float, float]:
    """Return mean and standard deviation with `weights`; exactly (mean, 0) if equal."""
    total = float(weights.sum())
    if not total:
        return 0.0, 0.0
    mean = float((weights * numbers).sum()) / total
    if total <= 1 or numbers.min() == numbers.max():
        return mean, 0.0
    variance = float((weights * (numbers - mean) ** 2).sum()) / (total - 1.0)
    return mean, variance**0.5


def _rewards(row: RowAdvantages) -> Array:
    if row.rewards is None:
        msg = "a row has no rewards for the statistics of the step; the role advantages writes them"
        raise ValueError(msg)
    return row.rewards
