"""A custom role that rewards single tokens: a penalty at every token beyond a budget."""

from __future__ import annotations

import numpy as np

from relax_actors import Reward, Role, Row


class TokenPenalty(Role):
    """Add a negative reward to every token beyond a budget, at the position of the token."""

    reads = ("trajectory", "reward")
    writes = "token_reward"

    budget: int = 256
    penalty: float = 0.01

    def handle(self, row: Row) -> Reward:
        """Return the row's reward with token rewards, `[total] float32`."""
        lengths = row.trajectory.sample_lengths
        positions = np.concatenate([np.arange(length) for length in lengths])
        token_values = np.where(positions < self.budget, 0.0, -self.penalty).astype(np.float32)
        return Reward(row.reward.values, row.reward.components, token_values, lengths.astype(np.int32))
