"""Role `prompts`: admits rows and replaces failed rows.

Rows are admitted up to `staleness.max` steps ahead of the trained version.

Invariant: the prompt of a row is a function of the settings, the row's id and the row that it requeues, if any. A
restarted PromptSource therefore admits the same rows.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from broker.subjects import CellId, RowId, Subjects
from relax_actors.config import Config
from relax_actors.config.rows import keeps_messages
from relax_actors.data.examples import row_of
from relax_actors.data.prompt_maker import PromptMaker, admission_of, open_data, room
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.data.trace_maker import prompt_of_traces
from relax_actors.errors import CodecError, ConfigError, StoreError, SubjectError
from relax_actors.messages import Dropped, DropReason, Prompt, Quarantined, Readmitted, Requeued
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.registry import built_in_spec
from relax_actors.runtime import END_COLUMNS, StatefulRole
from relax_actors.runtime.cells import observe
from relax_actors.runtime.row import parse_row
from relax_actors.runtime.row_order import RowOrder
from relax_actors.runtime.seeds import derive_seed
from relax_actors.training.first_prompts import FirstPrompts
from relax_actors.training.ledger import ledger_of

if TYPE_CHECKING:
    from broker.table import Cell

REQUEUE_COLUMNS = {"requeued": Requeued, "readmitted": Readmitted}
"""Columns of a quarantined row whose task is to be admitted again, and their types."""
MAX_ROWS_PER_WRITE = 256
"""Rows admitted at once, at most. In between, progress is reported and a request to stop is honoured."""


class PromptSource(StatefulRole):
    """Admits rows, drops surplus rows and readmits the tasks of requeued rows.

    All methods but `metrics` run in the role's thread.
    """

    writes = "prompt"
    spec = RoleSpec(
        reads=("prompt", *END_COLUMNS),
        writes=("prompt", "dropped", "quarantined", "readmitted"),
        single=True,
        section="prompts",
        start_order=50,
    )

    def setup(self) -> None:
        """Open the data source and the tokenizer."""
        config = self.context.config
        self._source = open_data(config.data, config.media)
        self._order = RowOrder(config, self._source)
        self._tokenizer = tokenizer = Tokenizer(config.model_path)
        admission = admission_of(config, self.context.table.store)
        self._maker = PromptMaker(
            config.data,
            tokenizer,
            room(config),
            config.rollout.max_tokens,
            admission,
            keeps_messages=keeps_messages(config),
        )
        self._metrics: dict[str, float] = {}
        # Requeued rows that are not readmitted yet, in the order of their requests (an ordered set).
        self._requeued: dict[RowId, None] = {}
        # First row that had the task, for each readmitted row.
        self._origins: dict[RowId, RowId] = {}
        self._ledger = ledger_of(config)
        # First refill of each slot by this incarnation: index of the row, by step and slot.
        self._first_refill: dict[tuple[int, int], int] = {}
        self._first_prompts = FirstPrompts(self.context)

    @classmethod
    def follows(cls, config: Config) -> list[str]:
        """Return the columns that begin or end rows, and the trainer's numbered cells."""
        subjects = Subjects(config.run.name)
        columns = [subjects.column(name) for name in ("prompt", *END_COLUMNS)]
        return columns + [subjects.numbered(kind, "*") for kind in built_in_spec("trainer").numbered]

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Rebuild the ledger, finish interrupted readmissions, and admit rows."""
        for cell_id, cell in cells:
            self._observe(cell_id, cell)
        if self._requeued:
            # The previous incarnation may have ended between the new row's prompt and the cell `readmitted`.
            for cell_id, cell in cells:
                if cell_id.kind == "group" and cell_id.field == "prompt":
                    self._finish_readmission(cell_id.row, cell)
        self.on_cells([])

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Update the ledger, drop surplus rows and admit all rows that are due.

        Raises:
            ConfigError: a slot was refilled `prompts.max_refills` times and failed again.
            AllRowsFailedError: the first prompts cannot be made, all for one reason.
        """
        for cell_id, cell in cells:
            self._observe(cell_id, cell)
        self._drop_surplus()
        while not self.context.stopping() and (rows := self._ledger.to_admit()[:MAX_ROWS_PER_WRITE]):
            self._check_refills(rows)
            if not self._admit(rows):
                break
            self.progress()
        lead = self.context.config.staleness.max
        self._metrics = self._compute_metrics()
        version = self._ledger.version
        self.context.report_waiting("weights 0" if version is None else f"weights {version + 1} (lead {lead})")

    def idle(self) -> None:
        """Write again what a stray cell prevented, which the trainer has removed meanwhile."""
        if self._ledger.to_admit() or self._ledger.surplus():
            self.on_cells([])

    def _observe(self, cell_id: CellId, cell: Cell) -> None:
        requeue_type = REQUEUE_COLUMNS.get(cell_id.field) if cell_id.kind == "group" else None
        if requeue_type is None:
            observe(self._ledger, self.context, cell_id, cell, built_in_spec("trainer").numbered.get(cell_id.kind))
            return
        try:
            value: Requeued | Readmitted = self.context.table.read(cell.data, requeue_type)
            new_row = parse_row(value.row) if isinstance(value, Readmitted) else None
        except (CodecError, StoreError, SubjectError) as error:
            self.context.journal.event("malformed_cell", subject=cell.subject, error=str(error))
            return
        if new_row is None:
            self._requeued[cell_id.row] = None
        else:
            self._requeued.pop(cell_id.row, None)
            self._origins[new_row] = self._origins.get(cell_id.row, cell_id.row)

    def _finish_readmission(self, row: RowId, cell: Cell) -> None:
        """Mark the row that this row's prompt requeues as readmitted, if it is not marked yet."""
        with suppress(CodecError, StoreError, SubjectError):
            if requeue_of := self.context.table.read(cell.data, Prompt).requeue_of:
                self._mark_readmitted(parse_row(requeue_of), row)

    def _mark_readmitted(self, old: RowId, row: RowId) -> None:
        if old in self._requeued:
            self.context.table.put(self.context.table.subject(old, "readmitted"), Readmitted(str(row)))
            self.context.journal.event("row_readmitted", row=str(old), as_row=str(row))
            del self._requeued[old]
            self._origins[row] = self._origins.get(old, old)

    def _admit(self, rows: list[RowId]) -> bool:
        """Write the first cells of rows; the first rows take over the tasks of requeued rows.

        A cell that exists already is not observed here: it arrives in stream order, or is a stray that the trainer
        removes.

        Returns:
            Whether any cell was written.
        """
        table = self.context.table
        requeued = dict(zip(rows, self._requeued, strict=False))
        cells = self._first_prompts.cells(rows, lambda row: self._prompt(row, requeued.get(row)))
        written = table.put_encoded(cells)
        for (subject, _), is_new in zip(cells, written, strict=True):
            if is_new:
                self._ledger.observe(table.subjects.parse(subject))
        for row, is_new in zip(rows, written, strict=True):
            if row not in requeued:
                continue
            if is_new:
                self._mark_readmitted(requeued[row], row)
            elif (cell := table.get(table.subject(row, "prompt"))) is not None:
                # The cell is this actor's own if only the acknowledgement of the write was lost.
                self._finish_readmission(row, cell)
        self._first_prompts.check()
        return any(written)

    def _check_refills(self, rows: list[RowId]) -> None:
        """End the run instead of refilling a slot forever.

        Refills by earlier incarnations do not count: their cause may have been fixed since.

        Raises:
            ConfigError: a row would exceed `prompts.max_refills` in its slot; the message says how the row before it
                ended.
        """
        config, table = self.context.config, self.context.table
        size = config.trainer.prompts_per_step
        self._first_refill = {key: index for key, index in self._first_refill.items() if key[0] >= self._ledger.floor}
        for row in rows:
            if row.index < size:
                continue
            first = self._first_refill.setdefault((row.step, row.index % size), row.index)
            if (row.index - first) // size < config.prompts.max_refills:
                continue
            predecessor = RowId(row.step, row.index - size)
            why = "its cells are gone"
            with suppress(CodecError):
                if (quarantined := table.fetch(table.subject(predecessor, "quarantined"), Quarantined)) is not None:
                    why = f"quarantined by {quarantined.role}: {quarantined.error}"
                elif (dropped := table.fetch(table.subject(predecessor, "dropped"), Dropped)) is not None:
                    why = f"dropped, {dropped.reason}: {dropped.detail}"
            msg = (
                f"a slot of step {row.step} was refilled {config.prompts.max_refills} times, and {predecessor} failed "
                f"too ({why}). Fix the cause, or raise prompts.max_refills"
            )
            raise ConfigError(msg)

    def _prompt(self, row: RowId, requeue_of: RowId | None) -> Prompt:
        """Make the prompt of a row from its own task, or from the task of the row that it requeues."""
        config = self.context.config
        task_row = row if requeue_of is None else self._origins.get(requeue_of, requeue_of)
        index = self._order.item(task_row)
        fields: dict[str, Any] = {
            "seed": derive_seed(config.run.seed, "row", row.step, row.index),
            "min_version": max(0, row.step - config.staleness.max),
            "requeue_of": "" if requeue_of is None else str(requeue_of),
        }
        task = self._source[index]
        if config.data.has_traces:
            return prompt_of_traces(task, self._tokenizer, **fields)
        if not config.from_data:
            return self._maker.make(task, row, **fields)
        fields["media"] = self._maker.media_of(task, row)
        compared = config.algorithm.compares_prompts
        return row_of(task, self._source[(index + 1) % len(self._source)] if compared else None, **fields)

    def _drop_surplus(self) -> None:
        """Drop rows in flight that the batch of their step does not name."""
        table = self.context.table
        surplus = [table.subject(row, "dropped") for row in self._ledger.surplus()]
        if surplus:
            detail = "the step's batch was complete without it"
            written = table.put_all((subject, Dropped(DropReason.SURPLUS, detail)) for subject in surplus)
            for subject, is_new in zip(surplus, written, strict=True):
                if is_new:
                    self._ledger.observe(table.subjects.parse(subject))

    def metrics(self) -> dict[str, float]:
        """Return the counts of the ledger after the last cells, the version and the lead."""
        return self._metrics

    def _compute_metrics(self) -> dict[str, float]:
        account = self._ledger.account()
        version = -1 if self._ledger.version is None else self._ledger.version
        return {
            "admitted": account.admitted,
            "trained": account.trained,
            "dropped": account.dropped,
            "quarantined": account.quarantined,
            "in_flight": account.in_flight,
            "version": version,
            "lead": max(0, self._ledger.furthest - version),
        }
