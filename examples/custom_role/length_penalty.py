"""A custom role that adds one column to the table."""

from __future__ import annotations

from relax_actors import Role, Row


class LengthPenalty(Role):
    """Subtract a small penalty for every token beyond a budget."""

    reads = ("trajectory", "reward")
    writes = "shaped_reward"

    budget: int = 256

    def handle(self, row: Row) -> list[float]:
        """Return the rewards of the row's samples minus the penalty."""
        lengths = [len(s.tokens) for s in row.trajectory.samples]
        return [r - 0.01 * max(0, n - self.budget) for r, n in zip(row.reward, lengths, strict=True)]
