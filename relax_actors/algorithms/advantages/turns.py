r"""Advantages of turns with rewards of their own, in float64; 0 at masked tokens.

`turn` compares a turn with the turns of the same number. A first turn may be harder than a last one, and returns shrink
as an episode goes on: a baseline that they share would reward every easy turn, wrong ones included. `all_turns`
compares it with all turns of the group, for episodes that take different ways, whose turns k have nothing in common.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relax_actors.algorithms.advantages.baselines import Scale, divisor
from relax_actors.algorithms.advantages.groups import Array, Group
from relax_actors.algorithms.advantages.returns import discounted_sums, time_step_rewards
from relax_actors.algorithms.specs import AdvantageSpec

TOLERANCE = 1e-6
"""Returns that differ by less, relative to the largest, are equal: sums of float32 rewards of tokens are not exact."""


@AdvantageSpec(
    needs=("tokens",),
    min_samples=2,
    per_token=True,
    by_turn=True,
    equal_rewards="zero",
    formula="G_k - mean(G_k of the group)",
    latex=r"G_{i,k} - \bar{G}_k, \quad t \in \text{turn } k",
)
def turn(group: Group, *, scale: Scale = "group_std", epsilon: float = 1e-6) -> Array:
    r"""Subtract the mean return of the turns of the same number, and divide by the pooled standard deviation.

    $A_{i,k} = \frac{G_{i,k} - \bar{G}_k}{\sigma + \epsilon}$ with
    $\sigma^2 = \frac{1}{N - K} \sum_{i,k} (G_{i,k} - \bar{G}_k)^2$ over the returns $G_{i,k}$ of turn k of sample i:
    N turns with K different numbers. Samples of one turn each get the advantages of `group`. A turn that only one
    sample has reached has advantage 0. It is the advantage of `environment.credit = "turn"` and, with the sequences of
    a sample in place of turns, of "branch"; `environment.discount` is that of a turn. Without rewards of turns, all
    turns of a sample have its reward.

    Args:
        group: rewards `[n]`, tokens, and token rewards `[total]` and turns `[total]` if there are any.
        scale: as in `group`; "group_mean" is the mean of all turns.
        epsilon: added to the standard deviation.

    Returns:
        `[total] float64`.
    """
    turns = _returns_by_turn(group)
    if turns is None:
        return np.zeros(len(group.mask))
    baseline = np.bincount(turns.numbers, turns.returns) / np.maximum(np.bincount(turns.numbers), 1)
    errors = turns.returns - baseline[turns.numbers]
    differ = np.bincount(turns.numbers, np.abs(errors) > turns.slack) > 0
    if not differ.any():
        return np.zeros(len(group.mask))
    if scale == "group_std":
        free = len(turns.returns) - len(np.unique(turns.numbers))
        by = float(np.sqrt(np.sum(errors[differ[turns.numbers]] ** 2) / free) + epsilon)
    else:
        by = divisor(turns.returns, scale, epsilon)
    return turns.spread(
        np.where(differ[turns.token_numbers], (turns.token_returns - baseline[turns.token_numbers]) / by, 0.0)
    )


@AdvantageSpec(
    needs=("tokens",),
    min_samples=2,
    per_token=True,
    by_turn=True,
    formula="G_k - mean(G of all turns of the group)",
    latex=r"G_{i,k} - \bar{G}, \quad t \in \text{turn } k",
)
def all_turns(group: Group, *, scale: Scale = "group_std", epsilon: float = 1e-6) -> Array:
    r"""Subtract the mean return of all turns of the group, and divide by their standard deviation.

    $A_{i,k} = \frac{G_{i,k} - \bar{G}}{\operatorname{std}(G) + \epsilon}$ over the returns $G_{i,k}$ of all turns k of
    all samples i. Samples of one turn each get the advantages of `group`. A sample with many turns counts more. For
    `environment.credit = "turn"` or "branch".

    Args:
        group: as in `turn`.
        scale: as in `group`.
        epsilon: added to the standard deviation.

    Returns:
        `[total] float64`.
    """
    turns = _returns_by_turn(group)
    if turns is None:
        return np.zeros(len(group.mask))
    baseline = turns.returns.mean()
    if not (np.abs(turns.returns - baseline) > turns.slack).any():
        return np.zeros(len(group.mask))
    return turns.spread((turns.token_returns - baseline) / divisor(turns.returns, scale, epsilon))


@dataclass(frozen=True, slots=True)
class _TurnReturns:
    """Returns of the turns of a group.

    Attributes:
        returns: `[turns]`, of each turn, at its first token.
        numbers: `[turns]`, number of each turn in its sample.
        token_returns: `[trained]`, of each trained token.
        token_numbers: `[trained]`, number of the turn of each trained token.
        mask: `[total]`, which tokens are trained.
    """

    returns: Array
    numbers: Array
    token_returns: Array
    token_numbers: Array
    mask: Array

    @property
    def slack(self) -> float:
        """Difference up to which returns are equal."""
        return float(TOLERANCE * np.abs(self.returns).max())

    def spread(self, values: Array) -> Array:
        """Return `[total]` with the values of the trained tokens, 0 elsewhere."""
        spread = np.zeros(len(self.mask))
        spread[self.mask] = values
        return spread


def _returns_by_turn(group: Group) -> _TurnReturns | None:
    """Return the returns of the turns; None if no token is trained."""
    totals, mask = discounted_sums(group, time_step_rewards(group), 1.0), group.mask
    if not mask.any():
        return None
    numbers, samples = group.turn_numbers[mask], group.spread(np.arange(group.n))[mask]
    _, first = np.unique(samples * (numbers.max() + 1) + numbers, return_index=True)
    return _TurnReturns(totals[mask][first], numbers[first], totals[mask], numbers, mask)
