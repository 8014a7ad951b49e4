r"""Decoupled normalisation of reward components: GDPO (arXiv 2601.05242)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from relax_actors.algorithms.advantages.baselines import subtract
from relax_actors.algorithms.advantages.groups import Array, Group
from relax_actors.algorithms.specs import AdvantageSpec


@AdvantageSpec(
    needs=("components",),
    min_samples=2,
    formula="sum over components k of w_k (r_k - mean(r_k)) / (std(r_k) + epsilon)",
    latex=r"\sum_k w_k \frac{r_{k,i} - \bar{r}_k}{\operatorname{std}(r_k) + \epsilon}",
)
def decoupled(group: Group, *, weights: Mapping[str, float] | None = None, epsilon: float = 1e-6) -> Array:
    r"""Normalise each component within the group, then add up: the first step of GDPO (arXiv 2601.05242).

    $S_i = \sum_k w_k \frac{r_{k,i} - \operatorname{mean}(r_k)}{\operatorname{std}(r_k) + \epsilon}$. A component
    that is equal for all samples adds exactly 0. The last step whitens S over the samples of the step (`whiten =
    "samples"`), as in the paper and TRL; verl whitens over tokens, so that long samples weigh more.

    Args:
        group: components `[n]` each.
        weights: weight of each component; 1 for those that are missing.
        epsilon: added to a standard deviation.

    Returns:
        `[n] float64`.

    Raises:
        ValueError: the group has no components, or a weight is of none.
    """
    weights = weights or {}
    if not group.components:
        msg = "a group has no reward components to normalise; set reward.function to a table of functions"
        raise ValueError(msg)
    if unknown := sorted(set(weights) - set(group.components)):
        msg = f"there is a weight for {unknown[0]!r}; the reward components are {', '.join(sorted(group.components))}"
        raise ValueError(msg)
    total = np.zeros(group.n)
    for name, values in sorted(group.components.items()):
        own = subtract(Group(rewards=values), np.full(group.n, values.mean()), scale="group_std", epsilon=epsilon)
        total += weights.get(name, 1.0) * own
    return total
