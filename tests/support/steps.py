"""Rows of whole steps, written as the roles before the trainer write them, and what the trainer made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from broker.subjects import RowId
from broker.table import Table
from relax_actors.messages import Advantage, Batch, Prompt, Trajectory, Weights
from relax_actors.roles.trainer import Trainer

ROWS, SAMPLES, TOKENS = 4, 4, 5


def put_step(table: Table, step: int, *, version: int, first: int = 0, **columns: Any) -> None:
    """Write rows `first` to `first + 3` of a step, sampled by one version, with their advantages."""
    put_rows(table, step, range(first, first + ROWS), version=version, **columns)


def put_rows(
    table: Table,
    step: int,
    indices: Iterable[int],
    *,
    version: int = 0,
    change: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory,
    returns: Callable[[Trajectory], Any] = lambda _: None,
    rewards: bool = False,
    **columns: Any,
) -> None:
    """Write rows of a step: prompt, trajectory, advantage, and what `returns` and `columns` make of the trajectory.

    With `rewards` the advantages hold the rewards of the samples, which are their values.
    """
    for index in indices:
        source = np.random.default_rng((step, index))
        total = SAMPLES * TOKENS
        row = RowId(step, index)
        prompt = np.array([1, 2, 10], np.int32)
        table.put(table.subject(row, "prompt"), Prompt("12>", prompt, "", {}, 0, 0))
        trajectory = Trajectory(
            prompt_tokens=prompt,
            lengths=np.full(SAMPLES, TOKENS, np.int32),
            token_ids=source.integers(0, 10, total, dtype=np.int32),
            logprobs=source.uniform(-3, -1, total).astype(np.float32),
            versions=np.full(total, version, np.int32),
            texts=[""] * SAMPLES,
            finish_reasons=["length"] * SAMPLES,
        )
        trajectory = change(trajectory)
        table.put(table.subject(row, "trajectory"), trajectory)
        for name, make in columns.items():
            table.put(table.subject(row, name), make(trajectory))
        values = source.normal(size=SAMPLES).astype(np.float64 if rewards else np.float32)
        advantage = Advantage(
            values,
            0.5,
            returns(trajectory),
            components={"style": index / 4, "answer": 1.0},
            rewards=values if rewards else None,
        )
        table.put(table.subject(row, "advantage"), advantage)


def read_all(table: Table, trainer: Trainer) -> None:
    """Deliver the cells of the table to the trainer, including those that it writes, until there are no new cells."""
    last = 0
    follows = trainer.follows(trainer.context.config)
    while new := [(c, cell) for c, cell in table.snapshot(follows) if cell.sequence > last]:
        last = new[-1][1].sequence
        trainer.on_cells(new)
        trainer.before_save()


def batches(table: Table) -> dict[int, list[int]]:
    """Rows of each step that was trained, in order."""
    found = table.snapshot([table.subjects.numbered("batch", "*")])
    return {cell_id.step: table.read(cell.data, Batch).rows for cell_id, cell in found}


def fingerprint(table: Table, version: int) -> str:
    """Published fingerprint of a version."""
    weights = table.fetch(table.subjects.numbered("weights", version), Weights)
    assert weights is not None
    return weights.fingerprint
