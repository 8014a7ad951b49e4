"""Role `advantages`: turns a row's rewards into advantages of its samples or tokens."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from relax_actors.algorithms.advantages import has_signal, token_advantages
from relax_actors.algorithms.estimators import Estimator, load_estimator
from relax_actors.errors import RowError
from relax_actors.messages import Advantage, DropReason, Reward
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import Drop, Role, Row


class Advantages(Role):
    """Group advantages of GRPO (arXiv 2402.03300, section 4.1), or of Dr. GRPO (arXiv 2503.20783)."""

    reads: ClassVar = ("reward",)
    writes: ClassVar = "advantage"
    max_concurrent_rows: ClassVar = 32
    spec: ClassVar = RoleSpec(section="advantages", start_order=30)

    def inputs(self) -> tuple[str, ...]:
        """Return the column that holds the rewards: the reward role's, or a shaping role's."""
        return (self.context.config.advantages.reads,)

    @cached_property
    def _estimate(self) -> Estimator:
        return load_estimator(self.context.config.advantages.estimator)

    def handle(self, row: Row) -> Advantage | Drop:
        """Return the row's advantages, or drop a row without signal where algorithm.filter_zero_variance is set.

        Raises:
            RowError: the column holds something else than finite rewards with the run's components.
        """
        settings, name = self.context.config.advantages, self.context.config.advantages.reads
        reward = self._reward(row, row.column(name))
        values, tokens = np.asarray(reward.values, np.float32), reward.token_values
        filters = self.context.config.algorithm.filter_zero_variance
        if filters and not has_signal(values) and (tokens is None or not tokens.any()):
            return Drop(DropReason.NO_SIGNAL, f"all {len(values)} samples scored {values[0]:g}")
        mean = float(values.mean())
        if tokens is None or reward.lengths is None:
            return Advantage(self._estimate(values, normalise=settings.normalise), mean)
        found = token_advantages(values, tokens, reward.lengths, normalise=settings.normalise)
        return Advantage(found, mean)

    def _reward(self, row: Row, column: Any) -> Reward:
        """Return a column as a checked reward; a plain list of numbers is one number a sample."""
        name = self.context.config.advantages.reads
        try:
            reward = column if isinstance(column, Reward) else Reward(np.asarray(column, np.float32))
        except (ValueError, TypeError, OverflowError) as error:
            msg = f"column {name} of {row.id} is not one finite number a sample: {error}"
            raise RowError(msg) from error
        expected = self.context.config.reward_components
        if reward is column and set(reward.components) != set(expected):
            msg = (
                f"column {name} of {row.id} has reward components {sorted(reward.components)}, the run has "
                f"{sorted(expected)}; write the same components in every row, or set reward.components"
            )
            raise RowError(msg)
        return reward
