"""Trainer: event-sourced; its state is the last checkpoint plus the `batch` cells after it.

Step k: take the rows, write `batch.k` naming them, step, write `weights.k+1`. A new life loads the checkpoint and
steps through the batches again; with the same kernels the weights come out bit for bit the same. A cell written by
a later life than ours means that we were replaced: we end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from broker.subjects import CellId, RowId
from broker.table import Cell
from relax_actors.engines.backends import training_backend
from relax_actors.errors import ConfigError, FencedError, RelaxError
from relax_actors.messages import Batch, Checkpoint, Dropped, Quarantined, Weights
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime import StatefulRole
from relax_actors.runtime import durable_folder as checkpoints
from relax_actors.runtime.cells import KINDS, Numbered, observe, put_own
from relax_actors.runtime.seeds import derive_seed
from relax_actors.training.checkpointer import Checkpointer
from relax_actors.training.ledger import Ledger
from relax_actors.training.step_feed import Feed
from relax_actors.training.step_rows import StepReader, StepRows
from relax_actors.training.warm_start import warm_start
from relax_actors.weights.publisher import Publisher
from relax_actors.weights.transports.base import ADDRESS_KEY


class Trainer(StatefulRole):
    """Owns the weights."""

    writes = "batch"
    spec = RoleSpec(
        reads=("prompt", "dropped", "quarantined", "advantage"),
        writes=("dropped", "quarantined"),
        numbered=("batch", "weights", "checkpoint"),
        notes=(ADDRESS_KEY,),
        removes=True,
        device=True,
        single=True,
        section="trainer",
        start_order=80,
    )

    def setup(self) -> None:
        """Build the engine."""
        config = self.context.config
        self._settings = config.trainer
        self._engine = training_backend(config).build(self.context)
        self._ledger = Ledger(config.trainer.prompts_per_step, config.run.steps, config.staleness.max)
        self._publisher = Publisher(self.context, self._engine)
        self._version = -1
        reader = StepReader(self.context.table, config)
        self._feed = Feed(self.context, self._engine, reader)
        self._needs = ("advantage", *reader.columns)
        self._arrived: dict[int, dict[str, set[int]]] = {}
        self._malformed: list[Cell] = []
        self._checkpoints = Checkpointer(self.context, self._engine, self._publisher, self._ledger)
        self._metrics: dict[str, float] = {}
        self._waited_since = time.monotonic()
        self._completed: dict[int, float] = {}

    def follows(self) -> list[str]:
        """Rows that are ready or ended, and what the trainer itself published in earlier lives."""
        subjects = self.context.table.subjects
        columns = [subjects.column(name) for name in ("prompt", "dropped", "quarantined", *self._needs)]
        return columns + [subjects.numbered(kind, "*") for kind in ("batch", "weights", "checkpoint")]

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Load the last checkpoint, step through the batches after it, go on."""
        last: Checkpoint | None = None
        purged = 0
        for cell_id, cell in cells:
            found = self._take(cell_id, cell)
            if isinstance(found, Checkpoint):
                purged = last.floor if last is not None else 0
                last = found if last is None or found.version > last.version else last
                self._checkpoints.known[found.version] = found.path
        self._tidy()
        if last is None:
            self._begin()
        else:
            folder = self.context.folder.root / last.path
            if not folder.is_dir():
                msg = f"checkpoint {folder} is published but missing; restore it, or start a run of another name"
                raise ConfigError(msg)
            try:
                checkpoints.verify(folder)
                self._engine.load(folder)
            except (RelaxError, OSError, ValueError, LookupError, RuntimeError) as error:
                msg = f"checkpoint {folder} cannot be read: {error}; restore it, or start a run of another name"
                raise ConfigError(msg) from error
            self._version = last.version
            if (found_print := self._engine.fingerprint()) != last.fingerprint:
                msg = f"checkpoint {folder} is corrupt: its fingerprint is {found_print}, published {last.fingerprint}"
                raise ConfigError(msg)
            # The life that raised the floor may have ended before it had let all rows go.
            self._publisher.purge(purged, last.floor)
        replayed = 0
        while self._version in self._ledger.batches:
            self._replay(self._version, self._ledger.batches[self._version])
            replayed += 1
        self._publisher.restore(self._version)
        if self._version >= self.context.config.run.steps:
            self._publisher.export()
            self._checkpoints.write(self._version)
        if replayed or last is not None:
            self.context.journal.event("recovered", version=self._version, replayed=replayed)
        self._advance()

    def _begin(self) -> None:
        config = self.context.config
        folder = self.context.folder.checkpoints
        if older := [p.name for p in folder.glob("[1-9]*")] if folder.is_dir() else []:
            msg = (
                f"{folder} holds checkpoints {sorted(older)} that the table does not know: the broker's store was lost "
                "or replaced; restore it, or move the folder away to begin anew"
            )
            raise ConfigError(msg)
        self._engine.initialise(config.run.seed)
        if config.trainer.warm_start is not None:
            with self.context.device_lock():
                loss = warm_start(config, self._engine, self.progress)
            self.context.journal.event("warm_started", steps=config.trainer.warm_start.steps, loss=loss)
        self._engine.finish_warm_start()
        self._version = 0
        self._publisher.publish(0)
        self._checkpoints.write(0)

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Take cells in; step while a step's rows are all there."""
        for cell_id, cell in cells:
            self._take(cell_id, cell)
        self._tidy()
        self._advance()

    def idle(self) -> None:
        """See that the weights in use are there, and publish the checkpoint that was begun."""
        self._checkpoints.finish()
        self._publisher.repair()

    def _take(self, cell_id: CellId, cell: Cell) -> Numbered | None:
        value = observe(self._ledger, self.context, cell_id, cell)
        if value is None and cell_id.kind in KINDS:
            self._malformed.append(cell)
        known = range(max(self._version, 0), self.context.config.run.steps)
        if cell_id.field in self._needs and cell_id.step in known:
            self._arrived.setdefault(cell_id.step, {}).setdefault(cell_id.field, set()).add(cell_id.index)
            self._completed[cell_id.step] = max(cell.stored, self._completed.get(cell_id.step, 0.0))
        return value

    def _tidy(self) -> None:
        """Remove what lies where only the trainer writes, and is not its own."""
        self.context.table.remove(self._malformed)
        self._malformed.clear()

    def _ready(self, step: int) -> set[int]:
        """Rows of a step that have all that the trainer needs."""
        arrived = self._arrived.get(step, {})
        return set.intersection(*(arrived.get(name, set()) for name in self._needs))

    def _advance(self) -> None:
        while self._version < self.context.config.run.steps and not self.context.stopping():
            if self._version in self._ledger.batches:
                self._replay(self._version, self._ledger.batches[self._version])
                continue
            rows = self._rows_of(self._version)
            if rows is None:
                break
            self._train(self._version, rows)
        step = self._version
        ready = len(self._ready(step))
        self.context.report_waiting(f"rows of step {step}: {ready} of {self._settings.prompts_per_step} are ready")

    def _rows_of(self, step: int) -> StepRows | None:
        """The step's rows, one a slot, if all are there and usable; rows that are not are dropped or quarantined."""
        ready = self._ready(step)
        lost = self._feed.take(step, self._ledger.candidates(step), ready.__contains__, self._settings.prompts_per_step)
        if lost:
            # Or a later life of the trainer is through with them.
            self.context.raise_if_fenced()
        for index, cell in lost.items():
            self._end(RowId(step, index), cell)
        return self._feed.complete(self._settings.prompts_per_step)

    def _end(self, row: RowId, cell: Dropped | Quarantined) -> None:
        """Take a row out of its step; PromptSource replaces it."""
        table, journal = self.context.table, self.context.journal
        field = "dropped" if isinstance(cell, Dropped) else "quarantined"
        table.put(table.subject(row, field), cell)
        if isinstance(cell, Dropped):
            journal.event("row_dropped", row=str(row), reason=cell.reason, detail=cell.detail)
        else:
            journal.event("row_quarantined", row=str(row), deliveries=cell.deliveries, error=cell.error)
        self._ledger.observe(CellId("group", row.step, row.index, field))

    def _train(self, step: int, rows: StepRows) -> None:
        waited = time.monotonic() - self._waited_since - self._feed.seconds
        # Of it, what passed until the last row was there; the rest is reading the rows, and whatever else is ours.
        starved = min(waited, max(0.0, waited - (time.time() - self._completed.get(step, 0.0))))
        batch = Batch(
            rows=rows.ids,
            seed=derive_seed(self.context.config.run.seed, "step", step),
            incarnation=self.context.incarnation,
            reward=float(np.mean([a.reward for a in rows.advantages])),
            staleness=step - rows.oldest,
            tokens=rows.tokens,
            unix_time=time.time(),
        )
        known = put_own(self.context, self.context.table.subjects.numbered("batch", step), batch)
        if known is not None:
            self._adopt(step, known)
            return
        self._ledger.observe(CellId("batch", step), batch)
        result = self._feed.finish(self._publisher.flush)
        self._finish(step)
        self._waited_since = time.monotonic()
        times = {"waited_seconds": waited, "starved_seconds": starved, "train_seconds": self._feed.seconds}
        times["early_seconds"] = self._feed.early_seconds
        self._report(step, batch, rows, {**result.metrics, **times})

    def _adopt(self, step: int, batch: Batch) -> None:
        """The step's batch is there already: an earlier life's is replayed, before a later life's we give way."""
        if batch.incarnation > self.context.incarnation:
            mine = self.context.incarnation
            msg = f"step {step} belongs to incarnation {batch.incarnation}; this is incarnation {mine}, which exits"
            raise FencedError(msg)
        self._ledger.observe(CellId("batch", step), batch)
        self._replay(step, batch)

    def _replay(self, step: int, batch: Batch) -> None:
        """Step through a batch that an earlier life had written."""
        rows = self._feed.replay(step, batch.rows)
        result = self._feed.finish(self._publisher.flush)
        self._finish(step)
        self._report(step, batch, rows, result.metrics)

    def _finish(self, step: int) -> None:
        """Publish what a step made."""
        self._version = step + 1
        self._arrived.pop(step, None)
        self._completed.pop(step, None)
        self._publisher.publish(self._version)
        self.progress()
        self._checkpoints.finish()
        if self._version == self.context.config.run.steps:
            self._publisher.export()
            self._checkpoints.write(self._version)
        elif self._version % self._settings.checkpoint_every == 0:
            self._checkpoints.begin(self._version)

    def _report(self, step: int, batch: Batch, rows: StepRows, measured: Mapping[str, float]) -> None:
        self._metrics = {
            "step": step,
            "reward": round(batch.reward, 5),
            "staleness": batch.staleness,
            "staleness_mean": round(step - float(np.mean(rows.oldest_of_rows)), 4),
            "span": rows.span,
            "stale_rows": rows.older_than(step, self.context.config.staleness.max),
            "waited_seconds": 0.0,
            "train_seconds": 0.0,
            **{name: round(float(value), 6) for name, value in measured.items()},
        }
        self.context.journal.metric({"kind": "step", **self._metrics})

    def close(self) -> None:
        """End what runs beside."""
        with suppress(RelaxError, OSError):
            self._checkpoints.finish()
        self._publisher.close()

    def metrics(self) -> dict[str, float]:
        """The version, and the last step's figures."""
        return {"version": self._version, "model_cpu_seconds": round(self._feed.cpu_seconds, 3)}


__all__ = ["Trainer", "Weights"]
