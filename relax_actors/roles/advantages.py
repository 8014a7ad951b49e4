"""Advantages: turns a row's rewards into one advantage a sample."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from relax_actors.algorithms.advantages import group_advantages, has_signal
from relax_actors.errors import RowError
from relax_actors.messages import Advantage, DropReason, Reward
from relax_actors.runtime import Drop, Role, Row


class Advantages(Role):
    """GRPO's group advantages (arXiv 2402.03300, 4.1.2), or Dr. GRPO's without the division (arXiv 2503.20783)."""

    reads: ClassVar = ("reward",)
    writes: ClassVar = "advantage"
    max_concurrent_rows: ClassVar = 32

    def inputs(self) -> tuple[str, ...]:
        """The column that holds the rewards: the reward role's, or a shaping role's."""
        return (self.context.config.advantages.reads,)

    def handle(self, row: Row) -> Advantage | Drop:
        """The row's advantages, or a drop if all samples scored the same and that is wanted."""
        settings = self.context.config.advantages
        column = row.column(settings.reads)
        try:
            rewards = np.asarray(column.values if isinstance(column, Reward) else column, np.float32)
        except (ValueError, TypeError, OverflowError) as error:
            msg = f"column {settings.reads} of {row.id} is not one number a sample: {error}"
            raise RowError(msg) from error
        if rewards.ndim != 1 or not len(rewards) or not np.isfinite(rewards).all():
            msg = f"column {settings.reads} of {row.id} is {rewards!r}, not one finite number a sample"
            raise RowError(msg)
        if self.context.config.algorithm.filter_zero_variance and not has_signal(rewards):
            return Drop(DropReason.NO_SIGNAL, f"all {len(rewards)} samples scored {rewards[0]:g}")
        return Advantage(group_advantages(rewards, normalise=settings.normalise), float(rewards.mean()))
