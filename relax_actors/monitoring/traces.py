"""Traces of the rows that a run's table still has, read as an observer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from broker.subjects import RowId
from broker.table import Table
from relax_actors.errors import RelaxError
from relax_actors.messages import Batch, Prompt, Reward, Trajectory
from relax_actors.runtime.cells import read_column
from relax_actors.traces import Trace, traces_of


@dataclass(slots=True)
class TableTraces:
    """Traces of trained rows, in the order of their steps and of the rows in the batch of each.

    Args:
        table: the table.
        run: name of the run.
        steps: steps to read; all if empty.

    Attributes:
        rows: number of rows that were read.
        gone: steps whose rows are collected, or were collected meanwhile.
        unreadable: what is wrong with rows that cannot be read.
    """

    table: Table
    run: str
    steps: Collection[int] = ()
    rows: int = 0
    gone: list[int] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Trace]:
        """Yield the traces of all rows; a step is in memory at once."""
        for step in self._trained():
            yield from self._of_step(step)

    def _trained(self) -> list[int]:
        """Return the steps to read that have a batch, ascending."""
        subjects = self.table.subjects
        found = [subjects.parse(name).step for name in self.table.list_subjects(subjects.numbered("batch", "*"))]
        self.gone = sorted({*self.steps} - {*found})
        return sorted(step for step in found if not self.steps or step in self.steps)

    def _of_step(self, step: int) -> Iterator[Trace]:
        batch = self.table.fetch(self.table.subjects.numbered("batch", step), Batch)
        ids = [] if batch is None else [RowId(step, index) for index in batch.rows]
        prompts = read_column(self.table, ids, "prompt", Prompt)
        trajectories = read_column(self.table, ids, "trajectory", Trajectory)
        rewards = read_column(self.table, ids, "reward", Reward)
        if not ids or (
            isinstance(prompts[0], RelaxError) and self.table.get(self.table.subject(ids[0], "prompt")) is None
        ):
            self.gone.append(step)
            return
        for row, prompt, trajectory, reward in zip(ids, prompts, trajectories, rewards, strict=True):
            if problem := next((each for each in (prompt, trajectory) if isinstance(each, RelaxError)), None):
                self.unreadable.append(f"{row}: {problem}")
                continue
            assert isinstance(prompt, Prompt)  # noqa: S101 narrows the type
            assert isinstance(trajectory, Trajectory)  # noqa: S101 narrows the type
            self.rows += 1
            scored = reward if isinstance(reward, Reward) else None
            yield from traces_of(prompt, trajectory, scored, run=self.run, row=str(row), step=step)
