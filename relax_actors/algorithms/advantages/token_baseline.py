r"""Optimal token baseline: returns minus a baseline that differs from position to position (arXiv 2602.07078).

The baseline of a position weighs the returns of the samples by the accumulated energy of their gradients,
$W_t = \sum_{s \le t} (1 - 2 \pi_s + \sum_v \pi_{s,v}^2)$, where $\pi_s$ is the probability of the sampled token and the
last term is the sum of the squared probabilities of the whole vocabulary: the squared norm of the gradient of a
log-prob to the logits. Masked tokens have no energy and advantage 0. Computed in float64.
"""

from __future__ import annotations

import numpy as np

from relax_actors.algorithms.advantages.groups import Array, Group, sample_slices
from relax_actors.algorithms.advantages.returns import discounted_sums, time_step_rewards
from relax_actors.algorithms.specs import AdvantageSpec

EPSILON = 1e-8
"""Added to the sum of the weights of a position."""


@AdvantageSpec(
    needs=("tokens", "logprobs", "squares"),
    min_samples=2,
    per_token=True,
    formula="G_t - sum(G_t W_t) / sum(W_t) over samples with a token at t, W_t = sum over s <= t of (1 - 2 p_s + sum_v "
    "p_s(v)^2)",
    latex=r"G_{i,t} - \frac{\sum_j G_{j,t} W_{j,t}}{\sum_j W_{j,t}}, "
    r"\quad W_{i,t} = \sum_{s \leq t} \left(1 - 2 \pi_s + \sum_v \pi_s(v)^2\right)",
)
def optimal_token(group: Group, *, gamma: float = 1.0) -> Array:
    r"""Subtract the optimal baseline of each position, counted in tokens of the sample (arXiv 2602.07078).

    $b_t = \frac{\sum_i G_{i,t} W_{i,t}}{\sum_i W_{i,t} + 10^{-8}}$ over the samples with a trained token at t, and
    $A_{i,t} = G_{i,t} - b_t$. A position that only one sample has a token at has baseline 0 there: it would be the
    return itself. If all rewards are equal and no token has one, all advantages are exactly 0.

    Args:
        group: rewards `[n]`, tokens, `logprobs` and `squares` `[total]`, and token rewards if there are any.
        gamma: discount of a trained token.

    Returns:
        `[total] float64`.
    """
    places = [np.flatnonzero(group.mask[part]) for part in sample_slices(group.token_counts)]
    return _with_baseline(group, gamma, places)


@AdvantageSpec(
    needs=("tokens", "logprobs", "squares"),
    min_samples=2,
    per_token=True,
    formula="G_k - sum(G_k W_k) / sum(W_k) over samples with k trained tokens or more, at the k-th trained token, W_k "
    "= sum over trained tokens up to it of (1 - 2 p_s + sum_v p_s(v)^2)",
    latex=r"G_{i,k} - \frac{\sum_j G_{j,k} W_{j,k}}{\sum_j W_{j,k}}, \quad W_{i,k} = \sum_{s \leq k} "
    r"\left(1 - 2 \pi_s + \sum_v \pi_s(v)^2\right), \quad t \text{ the } k\text{-th trained token}",
)
def optimal_turn(group: Group, *, gamma: float = 1.0) -> Array:
    r"""Subtract the optimal baseline of each position, counted in trained tokens (arXiv 2602.07078).

    For samples of several turns: as `optimal_token`, but samples are aligned without the tokens that the model did not
    write, such as the answers of tools, whose lengths differ.

    Args:
        group: as in `optimal_token`.
        gamma: discount of a trained token.

    Returns:
        `[total] float64`.
    """
    places = [np.arange(np.count_nonzero(group.mask[part])) for part in sample_slices(group.token_counts)]
    return _with_baseline(group, gamma, places)


def _with_baseline(group: Group, gamma: float, positions: list[Array]) -> Array:
    """Subtract the baseline of each position from the returns.

    Args:
        group: see `optimal_token`.
        gamma: discount of a trained token.
        positions: position of each trained token of each sample, ascending.
    """
    advantages = np.zeros(len(group.mask))
    if not group.has_token_rewards and group.rewards.min() == group.rewards.max():
        return advantages
    totals = discounted_sums(group, time_step_rewards(group), gamma)
    energy = 1.0 - 2.0 * np.exp(group.input("logprobs")) + group.input("squares")
    width = max((int(own[-1]) + 1 for own in positions if len(own)), default=0)
    weighted, weights, reached = np.zeros(width), np.zeros(width), np.zeros(width, np.int64)
    steps = [np.flatnonzero(group.mask[part]) + part.start for part in sample_slices(group.token_counts)]
    for at, own in zip(steps, positions, strict=True):
        accumulated = np.cumsum(energy[at])
        weighted[own] += totals[at] * accumulated
        weights[own] += accumulated
        reached[own] += 1
    baseline = np.where(reached > 1, weighted / (weights + EPSILON), 0.0)
    for at, own in zip(steps, positions, strict=True):
        advantages[at] = totals[at] - baseline[own]
    return advantages
