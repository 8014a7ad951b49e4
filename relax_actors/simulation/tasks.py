"""Tasks for simulated engines: all identical, answered at random."""

from __future__ import annotations

from relax_actors.data.task import Task


def make(*, size: int | None, seed: int) -> list[Task]:  # noqa: ARG001 nothing is random
    """Return `size` times the same task: prompt "0>", answer "1"."""
    return [Task("0>", "1")] * (size or 1000)
