r"""Advantages of samples: rewards minus a baseline, and divided by a scale.

Every estimator but `passk` and `mean_ratio` takes rewards of single tokens, too. The return of a token is the reward
of its sample plus the token rewards from this token to the end of the sample; the advantage of a token is its return
minus the baseline of its sample. The baseline and the scale come from the totals `R`: reward of a sample plus all of
its token rewards. This is the process supervision of GRPO (arXiv 2402.03300, section 4.1.3) with returns in place of
normalised rewards. Without token rewards all tokens of a sample have the same advantage, returned once, `[n]`.

Computed in float64. Equal rewards give exactly 0 where a baseline is subtracted: rounding of a mean would otherwise be
divided by epsilon. A standard deviation has divisor n - 1.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from relax_actors.algorithms.advantages.groups import Array, Group, correct_samples, sample_slices
from relax_actors.algorithms.specs import AdvantageSpec

Scale = Literal["none", "group_std", "batch_std", "group_mean"]
SCALES = {
    "group_std": ("std(r) + epsilon", r"\operatorname{std}(r) + \epsilon"),
    "batch_std": ("std(r of the step) + epsilon", r"\operatorname{std}_{\text{step}}(r) + \epsilon"),
    "group_mean": ("mean(r)", r"\bar{r}"),
}
"""Formulas of the divisors of an advantage."""


@AdvantageSpec(min_samples=2, equal_rewards="zero", formula="r - mean(r)", latex=r"r_i - \bar{r}")
def group(group: Group, *, scale: Scale = "group_std", epsilon: float = 1e-6) -> Array:
    r"""Subtract the mean reward of the group: GRPO (arXiv 2402.03300).

    $A_i = \frac{R_i - \operatorname{mean}(R)}{\operatorname{std}(R) + \epsilon}$ with `scale = "group_std"`: GRPO
    (DeepSeekMath, section 4.1.2). The paper does not define the standard deviation; this is the
    sample standard deviation, as in TRL and verl. Without the divisor it is Dr. GRPO (arXiv 2503.20783). A group of one
    has advantage 0.

    Args:
        group: rewards `[n]`; token rewards `[total]` if there are any.
        scale: "none", "group_std", "group_mean", or "batch_std", whose division the trainer does.
        epsilon: added to the standard deviation.

    Returns:
        `[n] float64`, or `[total] float64` with token rewards.
    """
    return subtract(group, np.full(group.n, group.totals.mean()), scale=scale, epsilon=epsilon)


@AdvantageSpec(
    min_samples=2,
    equal_rewards="zero",
    unscaled="RLOO (arXiv 2402.14740)",
    formula="r - mean(r of the other samples)",
    latex=r"r_i - \frac{1}{n-1} \sum_{j \neq i} r_j",
)
def rloo(group: Group, *, scale: Scale = "none", epsilon: float = 1e-6) -> Array:
    r"""Subtract the mean reward of the other samples: RLOO (arXiv 2402.14740).

    $A_i = R_i - \frac{1}{n-1} \sum_{j \ne i} R_j = \frac{n}{n-1} (R_i - \operatorname{mean}(R))$. The paper divides by
    nothing (`scale = "none"`). A group of one has advantage 0.

    Args:
        group: rewards `[n]`; token rewards `[total]` if there are any.
        scale: as in `group`.
        epsilon: added to the standard deviation.

    Returns:
        `[n] float64`, or `[total] float64` with token rewards.
    """
    totals = group.totals
    others = (totals.sum() - totals) / (group.n - 1) if group.n > 1 else totals
    return subtract(group, others, scale=scale, epsilon=epsilon)


@AdvantageSpec(
    needs=("tokens",),
    min_samples=2,
    equal_rewards="zero",
    plain_gradient="arXiv 2505.23585",
    formula="r - sum(|y| r) / sum(|y|)",
    latex=r"r_i - \frac{\sum_j |y_j| r_j}{\sum_j |y_j|}",
)
def length_weighted(group: Group, *, scale: Scale = "none", epsilon: float = 1e-6) -> Array:
    r"""Subtract the length-weighted mean reward: OPO's optimal baseline (arXiv 2505.23585).

    $A_i = R_i - \frac{\sum_j |y_j| R_j}{\sum_j |y_j|}$, with the trained tokens of a sample as its length. Meant
    exactly on-policy, without KL and entropy bonus. If no sample has a trained token, the advantages are 0.

    Args:
        group: rewards `[n]` and tokens.
        scale: as in `group`.
        epsilon: added to the standard deviation.

    Returns:
        `[n] float64`, or `[total] float64` with token rewards.
    """
    lengths, totals = group.trained_lengths, group.totals
    baseline = float((lengths * totals).sum() / lengths.sum()) if lengths.any() else totals
    return subtract(group, np.broadcast_to(baseline, totals.shape), scale=scale, epsilon=epsilon)


@AdvantageSpec(
    needs=("greedy",),
    per_token=True,
    plain_gradient="arXiv 2310.10505",
    formula="r - r(greedy sample)",
    latex=r"r_i - r_{\text{greedy}}",
)
def greedy(group: Group) -> Array:
    r"""Subtract the reward of the greedy sample: ReMax (arXiv 2310.10505).

    $A_{i,t} = \sum_{s \ge t} r_{i,s} - r(\text{greedy})$. The rollout generates the greedy sample in addition; it is
    not trained and counts in no other statistic. Its reward has no KL.

    Args:
        group: rewards `[n]` and `greedy_reward`.

    Returns:
        `[n] float64`, or `[total] float64` with token rewards.

    Raises:
        ValueError: there is no greedy sample.
    """
    if group.greedy_reward is None:
        msg = "a group has no greedy sample, whose reward is the baseline; the rollout must generate one"
        raise ValueError(msg)
    return _returns(group) - group.greedy_reward


@AdvantageSpec(
    min_samples=2,
    equal_rewards="zero",
    formula="r(best) - r(second best) for the best sample, else 0",
    latex=r"(r_{(1)} - r_{(2)}) \, \mathbb{1}[i = \arg\max_j r_j]",
)
def passk(group: Group, *, scale: Scale = "none", epsilon: float = 1e-6) -> Array:
    r"""Train the best sample only, by its lead over the second best (arXiv 2503.19595).

    $A_i = R_{(1)} - R_{(2)}$ for the best sample, 0 for all others: the largest reward of the group less the largest
    without the sample. `pass_at_k` is another estimator, for k samples out of the group. A tie for the best gives 0
    everywhere, as does a group of one.

    Args:
        group: rewards `[n]`; token rewards are summed into them.
        scale: as in `group`.
        epsilon: added to the standard deviation.

    Returns:
        `[n] float64`.
    """
    totals = group.totals
    advantages = np.zeros(group.n)
    if group.n > 1:
        best, second = np.argsort(-totals, kind="stable")[:2]
        advantages[best] = (totals[best] - totals[second]) / divisor(totals, scale, epsilon)
    return advantages


@AdvantageSpec(
    min_samples=2,
    equal_rewards="zero",
    formula="(1 - p) / (s + epsilon) for a correct sample, (1 - p - C(w - 1, k - 1) / C(n - 1, k - 1)) / (s + epsilon) "
    "for a wrong one, with w wrong samples, k = pass_k, p = 1 - C(w, k) / C(n, k), s = sqrt(p (1 - p))",
    latex=r"\frac{1 - p - [i \text{ is wrong}] \binom{w - 1}{k - 1} / \binom{n - 1}{k - 1}}{\sqrt{p (1 - p)} + "
    r"\epsilon}, \quad p = 1 - \binom{w}{k} / \binom{n}{k}, \; w = |\{j : r_j < r_{\text{correct}}\}|",
)
def pass_at_k(group: Group, *, pass_k: int = 4, correct_reward: float = 1.0, epsilon: float = 1e-6) -> Array:
    r"""Train the probability that one of k samples is correct: Pass@k Training (arXiv 2508.10751, equations 14, 15).

    The analytical advantage of a sample over all subsets of k samples of the group, whose reward is 1 if a sample of
    the subset is correct. p is the mean reward of a subset, s its standard deviation. With k = 1 it is that of GRPO
    with the standard deviation of the population. A group in which every subset has a correct sample, or none has, has
    advantage 0.

    Args:
        group: rewards `[n]`, without penalties of length and KL; token rewards are summed into them.
        pass_k: k; at most n.
        correct_reward: reward from which a sample is correct; the paper's rewards are 0 and 1.
        epsilon: added to s.

    Returns:
        `[n] float64`.
    """
    n, k = group.n, min(pass_k, group.n)
    correct = correct_samples(group.totals, correct_reward)
    wrong = n - int(np.count_nonzero(correct))
    fails = math.comb(wrong, k) / math.comb(n, k)
    others = math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1) if wrong else 0.0
    deviation = math.sqrt(fails * (1 - fails))
    advantages: Array = (fails - np.where(correct, 0.0, others)) / (deviation + epsilon)
    return advantages


@AdvantageSpec(
    min_samples=2,
    equal_rewards="zero",
    needs_positive=True,
    formula="(r - mean(r)) / mean(r)",
    latex=r"\frac{r_i - \bar{r}}{\bar{r}}",
)
def mean_ratio(group: Group) -> Array:
    r"""Divide the centred reward by the mean reward: MaxRL (arXiv 2602.02710).

    $A_i = \frac{R_i - \operatorname{mean}(R)}{\operatorname{mean}(R)}$; 0 if the mean is not positive, as for a group
    that solved nothing.

    Args:
        group: rewards `[n]`, at least 0; token rewards are summed into them.

    Returns:
        `[n] float64`.

    Raises:
        ValueError: a reward is negative.
    """
    totals = group.totals
    if totals.min() < 0:
        msg = f"MaxRL divides by the mean reward and needs rewards of at least 0; one is {totals.min():g}"
        raise ValueError(msg)
    mean = totals.mean()
    if totals.min() == totals.max() or not mean > 0:
        return np.zeros(group.n)
    advantages: Array = (totals - mean) / mean
    return advantages


@AdvantageSpec(
    min_samples=2,
    equal_rewards="zero",
    formula="1 for the best sample, -1 for the worst, else 0",
    latex=r"\mathbb{1}[i = \arg\max_j r_j] - \mathbb{1}[i = \arg\min_j r_j]",
)
def best_worst(group: Group) -> Array:
    """Make a pair of the best and the worst sample: online DPO, with the loss `preference` (arXiv 2402.04792).

    The first of equal samples counts. Equal rewards make no pair: all advantages are 0.

    Args:
        group: rewards `[n]`; token rewards are summed into them.

    Returns:
        `[n] float64`.
    """
    totals, advantages = group.totals, np.zeros(group.n)
    if totals.min() < totals.max():
        advantages[totals.argmax()], advantages[totals.argmin()] = 1.0, -1.0
    return advantages


@AdvantageSpec(
    needs=("role",),
    equal_rewards="signal",
    running_mean=True,
    formula="r - b, then b <- ema_decay b + (1 - ema_decay) r",
    latex=r"r_i - b, \quad b \leftarrow \eta b + (1 - \eta) r_i",
)
def ema(group: Group) -> Array:
    r"""Subtract the running mean reward of the task's role, `metadata["role"]` (SPIRAL, arXiv 2506.24119).

    $A_i = R_i - b_\text{role}$. This function returns $R_i$; the trainer, which owns the running means, subtracts them
    (`step_statistics.subtract_running_means`).

    Args:
        group: rewards `[n]`; token rewards `[total]` if there are any.

    Returns:
        `[n] float64`, or `[total] float64` with token rewards.
    """
    return _returns(group)


@AdvantageSpec(equal_rewards="signal", formula="r", latex="r_i")
def reward(group: Group) -> Array:
    """Use the reward itself, without a baseline: REINFORCE.

    Args:
        group: rewards `[n]`; token rewards `[total]` if there are any.

    Returns:
        `[n] float64`, or `[total] float64` with token rewards.
    """
    return _returns(group)


@AdvantageSpec(equal_rewards="signal", formula="0", latex="0")
def none(group: Group) -> Array:
    """Ignore the rewards: advantages of 0, to which distillation adds its signal.

    Args:
        group: rewards `[n]`.

    Returns:
        `[n] float64`, all 0.
    """
    return np.zeros(group.n)


def subtract(group: Group, baseline: Array, *, scale: Scale, epsilon: float) -> Array:
    """Return `(returns - baseline) / divisor`; exactly 0 if all rewards are equal.

    Args:
        group: rewards `[n]`; token rewards `[total]` if there are any.
        baseline: `[n] float64`.
        scale: see `group`.
        epsilon: added to the standard deviation.

    Returns:
        `[n] float64`, or `[total] float64` with token rewards.
    """
    totals = group.totals
    if not group.has_token_rewards:
        if totals.min() == totals.max():
            return np.zeros(group.n)
        advantages: Array = (totals - baseline) / divisor(totals, scale, epsilon)
        return advantages
    return (_returns(group) - group.spread(baseline)) / divisor(totals, scale, epsilon)


def divisor(totals: Array, scale: Scale, epsilon: float) -> float:
    """Return the divisor of advantages, 1 without a scale; raises ValueError for means below 0."""
    match scale:
        case "group_std":
            return float(totals.std(ddof=1) + epsilon) if len(totals) > 1 else 1.0
        case "group_mean":
            if totals.min() < 0:
                msg = f'scale "group_mean" needs rewards of at least 0; one is {totals.min():g}'
                raise ValueError(msg)
            return float(totals.mean()) or 1.0
        case "none" | "batch_std":
            return 1.0


def _returns(group: Group) -> Array:
    """Return of each sample `[n]`, or of each token `[total]` if tokens have rewards."""
    if group.token_rewards is None or not group.has_token_rewards:
        return group.rewards
    returns = np.zeros(len(group.token_rewards))
    for part, own in zip(sample_slices(group.token_counts), group.rewards, strict=True):
        returns[part] = own + np.cumsum(group.token_rewards[part][::-1])[::-1]
    return returns
