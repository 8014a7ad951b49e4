"""Advantages' part over the whole step: statistics of rows, and state across steps.

Invariant: the state is a function of the checkpoint and the batches after it, like the weights. It is saved beside the
engine's files, and a replayed step updates it from the same rows in the same order.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from relax_actors.algorithms.controllers import adapted_kl
from relax_actors.algorithms.named_functions import needs_whole_step, spec_of_advantage
from relax_actors.algorithms.step_statistics import (
    RowAdvantages,
    scale_by_reward_std,
    scale_by_signal,
    subtract_running_means,
    whiten,
)
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.errors import ConfigError

if TYPE_CHECKING:
    from relax_actors.training.step_rows import StepRows

STATE_FILE = "advantages.json"


class StepAdvantages:
    """Completes the advantages of one step after another.

    Attributes:
        means: running mean reward by role, for an estimator that subtracts it.
        kl_coefficient: coefficient of the KL in the reward for rows that the next version samples; None unless it
            adapts to `algorithm.kl.target`.
    """

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm, self._needs_whole_step = algorithm, needs_whole_step(algorithm)
        self._subtracts_means = spec_of_advantage(algorithm).running_mean
        self.means: dict[str, float] = {}
        kl = algorithm.kl
        self.kl_coefficient = kl.coefficient if kl.place == "reward" and kl.target is not None else None

    @property
    def _has_state(self) -> bool:
        return self._subtracts_means or self.kl_coefficient is not None

    def apply(self, rows: StepRows) -> StepRows:
        """Return a copy of a step's rows with complete advantages, float32; update the state.

        Call it once a step, with all of its rows in the order of the batch cell.
        """
        algorithm = self._algorithm
        self._adapt_kl(rows)
        if not self._needs_whole_step:
            return rows
        parts = [
            RowAdvantages(
                values=np.asarray(advantage.values, np.float64),
                lengths=trajectory.sample_lengths,
                mask=trajectory.trained,
                rewards=advantage.rewards,
                role=advantage.role,
                is_per_token=advantage.per_token,
            )
            for advantage, trajectory in zip(rows.advantages, rows.trajectories, strict=True)
        ]
        if self._subtracts_means:
            parts, self.means = subtract_running_means(parts, self.means, decay=algorithm.ema_decay)
        if algorithm.scale == "batch_std":
            parts = scale_by_reward_std(parts, epsilon=algorithm.epsilon)
        if algorithm.signal_scale:
            parts = scale_by_signal(parts)
        try:
            parts = whiten(parts, over=algorithm.whiten)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        advantages = [
            replace(advantage, values=row.values.astype(np.float32))
            for advantage, row in zip(rows.advantages, parts, strict=True)
        ]
        return replace(rows, advantages=advantages)

    def _adapt_kl(self, rows: StepRows) -> None:
        """Adapt the coefficient of the KL in the reward to the KL of the samples of a step."""
        kl, measured = self._algorithm.kl, rows.reward_kl
        if self.kl_coefficient is None or kl.target is None or measured is None:
            return
        samples = sum(int(np.count_nonzero(trajectory.trained_lengths)) for trajectory in rows.trajectories)
        self.kl_coefficient = adapted_kl(
            self.kl_coefficient, measured, target=kl.target, horizon=kl.horizon, samples=samples
        )

    def save(self, folder: Path) -> None:
        """Write the state into the folder of a checkpoint, if the algorithm has any."""
        if self._has_state:
            state = {"means": self.means, "kl_coefficient": self.kl_coefficient}
            (folder / STATE_FILE).write_text(json.dumps(state, sort_keys=True))

    def load(self, folder: Path) -> None:
        """Read the state of a checkpoint; JSON keeps every bit of a float64."""
        if self._has_state:
            state = json.loads((folder / STATE_FILE).read_text())
            self.means = {str(role): float(mean) for role, mean in state["means"].items()}
            coefficient = state["kl_coefficient"]
            self.kl_coefficient = None if coefficient is None else float(coefficient)
