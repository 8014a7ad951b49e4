"""PromptSource: admits rows as far ahead of the trained version as `staleness.max` allows, and replaces lost ones.

What it admits is a function of the configuration and the row's id, so that a new life of it admits the same.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from broker.subjects import CellId, RowId
from broker.table import Cell
from relax_actors.data.prompt_maker import PromptMaker, open_data, room
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.errors import CodecError, ConfigError, RowError, StoreError, SubjectError
from relax_actors.messages import Dropped, DropReason, Prompt, Quarantined, Readmitted, Requeued
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import END_COLUMNS, Context, StatefulRole
from relax_actors.runtime.cells import observe
from relax_actors.runtime.seeds import derive_seed, task_index
from relax_actors.training.ledger import Ledger


def first_cell(context: Context, row: RowId, make: Callable[[], Prompt]) -> tuple[str, bytes]:
    """Subject and content of the cell that begins a row: its prompt, or why it can have none."""
    table = context.table
    subject = table.subject(row, "prompt")
    try:
        return subject, table.encode(subject, make())
    except (RowError, CodecError) as error:
        trace = "".join(traceback.format_exception(error))
        context.journal.event("row_quarantined", row=str(row), deliveries=1, error=str(error))
        subject = table.subject(row, "quarantined")
        return subject, table.encode(subject, Quarantined(context.role, 1, str(error)[:2000], trace[-8000:]))


# What is said of a quarantined row whose task is wanted again.
WORDS = {"requeued": Requeued, "readmitted": Readmitted}


class PromptSource(StatefulRole):
    """Owns the admission of rows."""

    writes = "prompt"
    spec = RoleSpec(
        reads=("prompt", *END_COLUMNS),
        writes=("prompt", "dropped", "quarantined", "readmitted"),
        single=True,
        section="prompts",
        start_order=50,
    )

    def setup(self) -> None:
        """Open the data and the tokenizer."""
        config = self.context.config
        self._source = open_data(config.data)
        tokenizer = Tokenizer(config.model_path)
        self._maker = PromptMaker(config.data, tokenizer, room(config), config.rollout.max_tokens)
        self._figures: dict[str, float] = {}
        self._requeued: dict[RowId, None] = {}
        # The row whose task a row took over, where it was requeued.
        self._origins: dict[RowId, RowId] = {}
        self._ledger = Ledger(config.trainer.prompts_per_step, config.run.steps, config.staleness.max)

    def follows(self) -> list[str]:
        """Rows as they begin and end, and what the trainer publishes."""
        subjects = self.context.table.subjects
        columns = [subjects.column(name) for name in ("prompt", *END_COLUMNS)]
        return columns + [subjects.numbered(kind, "*") for kind in ("batch", "weights", "checkpoint")]

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Read the ledger again and go on."""
        for cell_id, cell in cells:
            self._take(cell_id, cell)
        if self._requeued:
            # The last life may have ended between a readmitted row's prompt and the word of it.
            for cell_id, cell in cells:
                if cell_id.kind == "group" and cell_id.field == "prompt":
                    self._find_readmitted(cell_id.row, cell)
        self.on_cells([])

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Keep the ledger; admit what may be admitted, drop what nobody will train."""
        for cell_id, cell in cells:
            self._take(cell_id, cell)
        self._drop_surplus()
        while not self.context.stopping() and (rows := self._ledger.to_admit()[:256]):
            self._require_an_end(rows)
            self._admit(rows)
            self.progress()
        lead = self.context.config.staleness.max
        self._figures = self._measure()
        version = self._ledger.version
        self.context.report_waiting("weights 0" if version is None else f"weights {version + 1} (lead {lead})")

    def _take(self, cell_id: CellId, cell: Cell) -> None:
        expected = WORDS.get(cell_id.field) if cell_id.kind == "group" else None
        if expected is None:
            observe(self._ledger, self.context, cell_id, cell)
            return
        try:
            value: Requeued | Readmitted = self.context.table.read(cell.data, expected)
            taken_by = RowId.parse(value.row) if isinstance(value, Readmitted) else None
        except (CodecError, StoreError, SubjectError) as error:
            self.context.journal.event("malformed_cell", subject=cell.subject, error=str(error))
            return
        if taken_by is None:
            self._requeued[cell_id.row] = None
        else:
            self._requeued.pop(cell_id.row, None)
            self._origins[taken_by] = self._origins.get(cell_id.row, cell_id.row)

    def _find_readmitted(self, row: RowId, cell: Cell) -> None:
        with suppress(CodecError, StoreError, SubjectError):
            if of := self.context.table.read(cell.data, Prompt).requeue_of:
                self._readmitted(RowId.parse(of), row)

    def _readmitted(self, old: RowId, row: RowId) -> None:
        if old in self._requeued:
            self.context.table.put(self.context.table.subject(old, "readmitted"), Readmitted(str(row)))
            self.context.journal.event("row_readmitted", row=str(old), as_row=str(row))
            del self._requeued[old]
            self._origins[row] = self._origins.get(old, old)

    def _admit(self, rows: list[RowId]) -> None:
        table = self.context.table
        requeued = dict(zip(rows, self._requeued, strict=False))
        cells = [first_cell(self.context, row, partial(self._prompt, row, requeued.get(row))) for row in rows]
        written = table.put_encoded(cells)
        for subject, _ in cells:
            self._ledger.observe(table.subjects.parse(subject))
        for row, is_new in zip(rows, written, strict=True):
            if row not in requeued:
                continue
            if is_new:
                self._readmitted(requeued[row], row)
            elif (cell := table.get(table.subject(row, "prompt"))) is not None:
                # Ours, if only its acknowledgement was lost.
                self._find_readmitted(row, cell)

    def _require_an_end(self, rows: list[RowId]) -> None:
        """A step that is filled up again and again is never trained.

        Raises:
            ConfigError: a row would be one too many in its slot; says how the one before it ended.
        """
        config, table = self.context.config, self.context.table
        for row in rows:
            if row.index // config.trainer.prompts_per_step <= config.prompts.max_refills:
                continue
            before = RowId(row.step, row.index - config.trainer.prompts_per_step)
            why = "no word of it is left"
            with suppress(CodecError):
                if (bad := table.fetch(table.subject(before, "quarantined"), Quarantined)) is not None:
                    why = f"quarantined by {bad.role}: {bad.error}"
                elif (dropped := table.fetch(table.subject(before, "dropped"), Dropped)) is not None:
                    why = f"dropped, {dropped.reason}: {dropped.detail}"
            msg = (
                f"a slot of step {row.step} was refilled {config.prompts.max_refills} times, and {before} failed too "
                f"({why}); mend the cause, or raise prompts.max_refills"
            )
            raise ConfigError(msg)

    def _prompt(self, row: RowId, requeue_of: RowId | None) -> Prompt:
        """The prompt of a row: its own task, or that of a requeued one."""
        config = self.context.config
        of = row if requeue_of is None else self._origins.get(requeue_of, requeue_of)
        index = task_index(config.run.seed, of, config.trainer.prompts_per_step, len(self._source))
        return self._maker.make(
            self._source[index],
            seed=derive_seed(config.run.seed, "row", row.step, row.index),
            min_version=max(0, row.step - config.staleness.max),
            requeue_of="" if requeue_of is None else str(requeue_of),
        )

    def _drop_surplus(self) -> None:
        table = self.context.table
        surplus = [table.subject(row, "dropped") for row in self._ledger.surplus()]
        if surplus:
            detail = "the step's batch was complete without it"
            table.put_all((subject, Dropped(DropReason.SURPLUS, detail)) for subject in surplus)
            for subject in surplus:
                self._ledger.observe(table.subjects.parse(subject))

    def metrics(self) -> dict[str, float]:
        """The ledger, as of the last cells."""
        return self._figures

    def _measure(self) -> dict[str, float]:
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
