"""Tasks for simulated engines: all alike, and answered at random."""

from __future__ import annotations

from relax_actors.data.task import Task


def make(*, size: int | None, seed: int) -> list[Task]:  # noqa: ARG001 there is nothing to draw
    """`size` times the same task: "0>" -> "1"."""
    return [Task("0>", "1")] * (size or 1000)
