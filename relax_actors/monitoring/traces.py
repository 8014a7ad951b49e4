"""Records of a run's trained rows, from its table and its record."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from broker.subjects import RowId
from broker.table import Table
from relax_actors.errors import RelaxError
from relax_actors.messages import Batch, Prompt, Reward, Trajectory
from relax_actors.record.record import Record
from relax_actors.record.rules import End
from relax_actors.runtime.cells import read_column
from relax_actors.traces import TraceError, traces_of
from relax_actors.traces.write import Record as Written
from relax_actors.traces.write import record_of


@dataclass(slots=True)
class RunTraces:
    """Traces of trained rows as records, in the order of steps and batches.

    Args:
        table: the table.
        record: the record.
        run: name of the run.
        kind: name of the format.
        slots: `trainer.prompts_per_step`, by which rows of the record are ordered as in their batch.
        steps: steps to read; all if empty.

    Attributes:
        rows: number of rows that were read.
        lacking: rows that neither the table nor the record has.
        unreadable: what is wrong with rows that cannot be read, or not be written exactly.
    """

    table: Table
    record: Record
    run: str
    kind: str
    slots: int
    steps: Collection[int] = ()
    rows: int = 0
    lacking: list[RowId] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Written]:
        """Yield the records of all rows; a step is in memory at once."""
        subjects = self.table.subjects
        known = [subjects.parse(name).step for name in self.table.list_subjects(subjects.numbered("batch", "*"))]
        for step in sorted({*known, *self.record.steps()}):
            if not self.steps or step in self.steps:
                yield from self._of_step(step)

    def _of_step(self, step: int) -> Iterator[Written]:
        batch = self.table.fetch(self.table.subjects.numbered("batch", step), Batch)
        rows = self._recorded(step) if batch is None else [RowId(step, index) for index in batch.rows]
        kept = {row for row in rows if batch is not None and self._is_there(row)}
        own = [row for row in rows if row in kept]
        columns = (
            dict(zip(own, read_column(self.table, own, name, kind), strict=True))
            for name, kind in (("prompt", Prompt), ("trajectory", Trajectory), ("reward", Reward))
        )
        prompts, trajectories, rewards = columns
        for row in rows:
            cells = (prompts[row], trajectories[row], rewards[row]) if row in kept else self._of_record(row)
            yield from self._records(row, *cells)

    def _is_there(self, row: RowId) -> bool:
        return self.table.get(self.table.subject(row, "trajectory")) is not None

    def _recorded(self, step: int) -> list[RowId]:
        """Return the trained rows of a step in the order of their slots, by the record."""
        kept = self.record.step(step)
        indices = [group.index for group in kept.groups if group.end is End.TRAINED] if kept is not None else []
        return [RowId(step, index) for index in sorted(indices, key=lambda index: index % self.slots)]

    def _of_record(self, row: RowId) -> tuple[object, object, object]:
        """Return prompt, trajectory and reward of a recorded row, or None."""
        try:
            cells = self.record.row(row)
            if cells is None:
                return None, None, None
            return cells.read("prompt", Prompt), cells.read("trajectory", Trajectory), cells.read("reward", Reward)
        except RelaxError as error:
            return error, error, None

    def _records(self, row: RowId, prompt: object, trajectory: object, reward: object) -> list[Written]:
        """Return the records of a row: of all of its samples or of none."""
        if problem := next((each for each in (prompt, trajectory) if isinstance(each, RelaxError)), None):
            self.unreadable.append(f"{row}: {problem}")
        elif not isinstance(prompt, Prompt) or not isinstance(trajectory, Trajectory):
            self.lacking.append(row)
        else:
            scored = reward if isinstance(reward, Reward) else None
            try:
                traces = traces_of(prompt, trajectory, scored, run=self.run, row=str(row), step=row.step)
                made = [record_of(trace, self.kind) for trace in traces]
            except TraceError as error:
                self.unreadable.append(str(error))
                return []
            self.rows += 1
            return made
        return []
