"""Role `advantages`: computes advantages of a row's samples or tokens from its rewards."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from relax_actors.algorithms.advantages.estimation import REFERENCE, SQUARES, VALUES, RowEstimation
from relax_actors.config import Config
from relax_actors.errors import RowError
from relax_actors.messages import Advantage, DropReason, Reward, Trajectory, Weights
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import Drop, Role, Row

_PER_TOKEN = ("actor_fwd", REFERENCE, VALUES, SQUARES)


class Advantages(Role):
    """Computes advantages within a row's group of samples with `algorithm.advantage`.

    It reads the rewards and the columns that the algorithm needs: the trajectory, log-probs of the reference for a KL
    in the reward, values of a critic. Statistics of the whole step are added by the trainer.
    """

    reads: ClassVar = ("reward",)
    writes: ClassVar = "advantage"
    max_concurrent_rows: ClassVar = 32
    spec: ClassVar = RoleSpec(section="advantages", rows="sampled", start_order=30)

    def inputs(self, config: Config) -> tuple[str, ...]:
        """Return the column with the rewards, and the columns that the estimator needs."""
        return (config.advantages.reads, *RowEstimation(config).columns)

    @cached_property
    def _coefficients(self) -> dict[int, float | None]:
        """Coefficients of the KL in the reward by version of the weights."""
        return {}

    @cached_property
    def _estimation(self) -> RowEstimation:
        return RowEstimation(self.context.config)

    def handle(self, row: Row) -> Advantage | Drop:
        """Return the advantages, or a `Drop` if the row has nothing to train.

        Raises:
            RowError: the column does not hold finite rewards with the components of the run, another column does not
                fit it, or the estimator refuses the row.
        """
        name, estimation = self.context.config.advantages.reads, self._estimation
        reward = self._reward(row, row.column(name))
        columns = {column: self._column(row, column) for column in estimation.columns}
        if why := estimation.without_signal(reward, columns):
            return Drop(DropReason.NO_SIGNAL, why)
        coefficient = self._kl_coefficient(columns["trajectory"], row) if estimation.adapts_kl else None
        advantage = estimation.estimate(reward, columns, f"column {name} of {row.id}", coefficient)
        if estimation.is_without_signal(advantage):
            return Drop(DropReason.NO_SIGNAL, "the advantages of all samples are 0")
        return advantage

    def _kl_coefficient(self, trajectory: Trajectory, row: Row) -> float | None:
        """Return the coefficient of the newest weights that sampled the row; raises RowError."""
        version = int(trajectory.versions.max())
        if version not in self._coefficients:
            table = self.context.table
            cell = table.fetch(table.subjects.numbered("weights", version), Weights)
            if cell is None:
                msg = f"the trajectory of {row.id} has a token of weights {version}, which are not published"
                raise RowError(msg)
            self._coefficients[version] = cell.kl_coefficient
        return self._coefficients[version]

    def _column(self, row: Row, name: str) -> Any:
        """Return a column; numbers of tokens as an array."""
        value = row.column(name)
        if name not in _PER_TOKEN:
            return value
        try:
            return np.asarray(value, np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            msg = f"column {name} of {row.id} is not one number per token: {error}"
            raise RowError(msg) from error

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
