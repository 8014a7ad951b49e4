"""Advantage estimators by family: pure functions of the samples of one prompt.

`baselines` has those with one advantage a sample, `returns` and `token_baseline` those of tokens, `components` the
decoupled normalisation of several rewards. None imports torch, so the role `advantages` does not.
"""

from relax_actors.algorithms.advantages.groups import Group
from relax_actors.algorithms.specs import AdvantageSpec

__all__ = ["AdvantageSpec", "Group"]
