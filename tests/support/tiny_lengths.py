"""A user's role that may join a live run, with versions of its code for tests that replace it."""

from __future__ import annotations

from relax_actors import Role, Row


class Lengths(Role):
    """Count the tokens of each sample."""

    reads = ("trajectory",)
    writes = "lengths"

    def handle(self, row: Row) -> list[int]:
        """Return a number for each sample."""
        return [len(sample.tokens) for sample in row.trajectory.samples]
