r"""Advantages of tokens from discounted rewards: REINFORCE++ and GAE.

Only trained tokens are time steps: masked tokens, such as the answer of a tool, are skipped and cost no discount. The
reward of a masked token belongs to the trained token before it; before the first trained token of a sample it is
ignored, because no action led to it. The reward of a sample arrives at its last trained token. verl and TRL's PPO skip
masked tokens, too (verl with their rewards); slime and Relax count them as time steps.

Computed in float64. Masked tokens have advantage 0.
"""

from __future__ import annotations

import numpy as np

from relax_actors.algorithms.advantages.groups import Array, Group, sample_slices
from relax_actors.algorithms.specs import AdvantageSpec


@AdvantageSpec(
    needs=("tokens",),
    per_token=True,
    equal_rewards="signal",
    formula="G_t = r_t + gamma G_(t+1)",
    latex=r"G_t = r_t + \gamma G_{t+1}",
)
def returns(group: Group, *, gamma: float = 1.0) -> Array:
    r"""Use the discounted return of each token: REINFORCE++ (arXiv 2501.03262).

    $G_t = r_t + \gamma G_{t+1}$, where $r_t$ contains the KL in the reward, $-\beta\, k1_t$, and at the last trained
    token the reward of the sample. The paper then whitens over all tokens of the step (`whiten = "tokens"`).

    Args:
        group: rewards `[n]`, tokens, and token rewards `[total]` if there are any.
        gamma: discount of a time step.

    Returns:
        `[total] float64`.
    """
    return discounted_sums(group, time_step_rewards(group), gamma)


@AdvantageSpec(
    needs=("tokens", "values"),
    per_token=True,
    equal_rewards="signal",
    formula="d_t + gamma gae_lambda A_(t+1), with d_t = r_t + gamma V_(t+1) - V_t",
    latex=r"\delta_t + \gamma \lambda A_{t+1}, \quad \delta_t = r_t + \gamma V_{t+1} - V_t",
)
def gae(group: Group, *, gamma: float = 1.0, gae_lambda: float = 1.0, gae_alpha: float | None = None) -> Array:
    r"""Estimate advantages from the values of a critic: GAE (arXiv 1506.02438).

    $\delta_t = r_t + \gamma V_{t+1} - V_t$ and $A_t = \sum_k (\gamma\lambda)^k \delta_{t+k}$. $V_{t+1}$ is the value at
    the next trained token; after the last one it is 0. The targets of the critic are $A_t + V_t$, not whitened, with
    `critic_lambda` in these advantages if that is set (decoupled GAE, arXiv 2503.01491).

    Args:
        group: rewards `[n]`, tokens, `values` `[total]`, and token rewards `[total]` if there are any.
        gamma: discount of a time step.
        gae_lambda: 1 uses whole returns, 0 one step.
        gae_alpha: alpha of the length-adaptive lambda of each sample, 1 - 1 / (alpha |y|), at least 0, with the
            sample's trained tokens |y| (VAPO, arXiv 2504.05118, section 4.2); None for `gae_lambda`.

    Returns:
        `[total] float64`.
    """
    mask, values, deltas = group.mask, group.input("values"), time_step_rewards(group)
    for part in sample_slices(group.token_counts):
        steps = np.flatnonzero(mask[part]) + part.start
        later = np.append(values[steps], 0.0)[1:]
        deltas[steps] += gamma * later - values[steps]
    if gae_alpha is None:
        return discounted_sums(group, deltas, gamma * gae_lambda)
    adapted = 1.0 - 1.0 / (gae_alpha * np.maximum(group.trained_lengths, 1))
    return discounted_sums(group, deltas, gamma * np.maximum(adapted, 0.0))


def critic_targets(group: Group, advantages: Array, *, gamma: float, critic_lambda: float | None) -> Array:
    """Return a critic's targets, advantages plus values, `[total] float64`; 0 if masked.

    Args:
        group: as in `gae`.
        advantages: `[total]`, of the tokens.
        gamma: discount of a time step.
        critic_lambda: lambda of the advantages in the targets; None to take `advantages`.
    """
    if critic_lambda is not None:
        advantages = gae(group, gamma=gamma, gae_lambda=critic_lambda)
    return np.where(group.mask, advantages + group.input("values"), 0.0)


def time_step_rewards(group: Group) -> Array:
    """Collect a group's rewards at its trained tokens, `[total] float64`; 0 if masked.

    Args:
        group: rewards `[n]`, tokens, and token rewards `[total]` if there are any.
    """
    mask = group.mask
    rewards = np.zeros(len(mask))
    for part, reward in zip(sample_slices(group.token_counts), group.rewards, strict=True):
        steps = np.flatnonzero(mask[part])
        if not len(steps):
            continue
        if group.token_rewards is not None:
            # The trained token at or before each token; -1 before the first.
            owner = np.cumsum(mask[part]) - 1
            counted = owner >= 0
            own = np.bincount(owner[counted], weights=group.token_rewards[part][counted], minlength=len(steps))
            rewards[part.start + steps] = own
        rewards[part.start + steps[-1]] += reward
    return rewards


def discounted_sums(group: Group, per_step: Array, discount: float | Array) -> Array:
    """Sum trained tokens' numbers from each to its sample's end, `[total] float64`.

    Args:
        group: tokens.
        per_step: `[total] float64`.
        discount: factor of a time step, or `[n]` for each sample.
    """
    mask, sums = group.mask, np.zeros(len(per_step))
    factors = np.broadcast_to(discount, group.n).tolist()
    for part, factor in zip(sample_slices(group.token_counts), factors, strict=True):
        steps = np.flatnonzero(mask[part]) + part.start
        if factor == 1.0:
            sums[steps] = np.cumsum(per_step[steps][::-1])[::-1]
            continue
        total = 0.0
        for at in steps[::-1]:
            total = per_step[at] + factor * total
            sums[at] = total
    return sums
