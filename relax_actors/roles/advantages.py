"""Role `advantages`: computes advantages of a row's samples or tokens from its rewards."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from relax_actors.algorithms.advantages import has_signal
from relax_actors.algorithms.estimators import Estimator, load_estimator, token_form
from relax_actors.config import Config
from relax_actors.config.pools import AdvantagesSection
from relax_actors.errors import RowError
from relax_actors.messages import Advantage, DropReason, Reward
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import Drop, Role, Row


class Advantages(Role):
    """Computes advantages within a row's group of samples with `advantages.estimator`.

    Built-in estimators: `grpo` (arXiv 2402.03300, section 4.1; without normalisation Dr. GRPO, arXiv 2503.20783), and
    `rloo` (leave-one-out). Rows with token rewards need an estimator with a token form: `grpo`.
    """

    reads: ClassVar = ("reward",)
    writes: ClassVar = "advantage"
    max_concurrent_rows: ClassVar = 32
    spec: ClassVar = RoleSpec(section="advantages", start_order=30)

    def inputs(self, config: Config) -> tuple[str, ...]:
        """Return the column with the rewards: `reward`, or the column of a reward-shaping role."""
        return (config.advantages.reads,)

    @cached_property
    def _estimate(self) -> Estimator:
        return load_estimator(self.context.config.advantages.estimator)

    def handle(self, row: Row) -> Advantage | Drop:
        """Return the advantages, or a `Drop` if algorithm.filter_zero_variance excludes the row.

        Raises:
            RowError: the column does not hold finite rewards with the components of the run, or it has token_values and
                the estimator has no token form.
        """
        settings, name = self.context.config.advantages, self.context.config.advantages.reads
        reward = self._reward(row, row.column(name))
        values, tokens = np.asarray(reward.values, np.float32), reward.token_values
        filters = self.context.config.algorithm.filter_zero_variance
        if filters and not has_signal(values) and (tokens is None or not tokens.any()):
            return Drop(DropReason.NO_SIGNAL, f"all {len(values)} samples scored {values[0]:g}")
        return estimate_advantage(reward, self._estimate, settings, f"column {name} of {row.id}")

    def _reward(self, row: Row, column: Any) -> Reward:
        """Return a column as a checked reward; a plain list holds one number per sample."""
        name = self.context.config.advantages.reads
        try:
            reward = column if isinstance(column, Reward) else Reward(np.asarray(column, np.float32))
        except (ValueError, TypeError, OverflowError) as error:
            msg = f"column {name} of {row.id} is not a list of one finite number per sample: {error}"
            raise RowError(msg) from error
        expected = self.context.config.reward_components
        if reward is column and set(reward.components) != set(expected):
            msg = (
                f"column {name} of {row.id} has reward components {sorted(reward.components)}, the run has "
                f"{sorted(expected)}; write the same components in every row, or set reward.components"
            )
            raise RowError(msg)
        return reward


def estimate_advantage(reward: Reward, estimator: Estimator, settings: AdvantagesSection, source: str) -> Advantage:
    """Compute the advantages of a row: of its tokens if the reward has `token_values`, else of its samples.

    Args:
        reward: reward of the row.
        estimator: estimator named by `advantages.estimator`.
        settings: section [advantages] of the run.
        source: origin of the reward, for errors.

    Raises:
        RowError: the reward has token_values, and the estimator has no token form.
    """
    values = np.asarray(reward.values, np.float32)
    mean = float(values.astype(np.float64).mean())
    components = {name: float(part.astype(np.float64).mean()) for name, part in reward.components.items()}
    if reward.token_values is None or reward.lengths is None:
        return Advantage(estimator(values, normalise=settings.normalise), mean, components=components)
    estimate_tokens = token_form(estimator)
    if estimate_tokens is None:
        msg = (
            f"{source} has token_values, but advantages.estimator = {settings.estimator!r} has no token form; "
            'set advantages.estimator = "grpo", or write rewards of samples only'
        )
        raise RowError(msg)
    found = estimate_tokens(values, reward.token_values, reward.lengths, normalise=settings.normalise)
    return Advantage(found, mean, lengths=reward.lengths, components=components)
