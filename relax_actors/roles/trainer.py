"""Role `trainer`: steps the model on finished rows; owns the weights and the checkpoints.

Invariant: the state is a function of the last checkpoint and the `batch` cells after it. Step k reads its rows, writes
`batch.k` with their names and order, steps, and publishes `weights.k+1`. A restarted trainer loads the checkpoint and
replays the batches; with the same kernels it computes the same weights, bit for bit. A numbered cell of a higher
incarnation means that this trainer has been replaced: it exits.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from broker.subjects import CellId, RowId, Subjects
from relax_actors.config import Config
from relax_actors.engines.backends import training_backend
from relax_actors.engines.protocols.training import StepResult
from relax_actors.errors import FencedError, RelaxError
from relax_actors.messages import Batch, Checkpoint, RowCounts, Weights
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.registry import numbered_cells, role_names
from relax_actors.runtime import StatefulRole
from relax_actors.runtime.cells import is_oversized, observe, put_own
from relax_actors.runtime.profiles import ProfileRequests, request_kind
from relax_actors.runtime.seeds import derive_seed
from relax_actors.training.checkpointer import Checkpointer
from relax_actors.training.ledger import ledger_of
from relax_actors.training.metric_of_step import BY_MICRO_BATCH, figures_of_step, micro_batch_figures
from relax_actors.training.row_endings import RowEndings
from relax_actors.training.step_feed import StepFeed, proximal_score
from relax_actors.training.step_rows import StepReader, StepRows, columns_to_train, last_column
from relax_actors.training.warm_start import warm_start
from relax_actors.weights.publisher import Publisher
from relax_actors.weights.publisher_actor import Export, Publications, Publish, Repair, Restore

if TYPE_CHECKING:
    from broker.table import Cell


class Trainer(StatefulRole):
    """Trains one step after another and publishes the weights of each.

    All methods but `metrics` run in the role's thread. Publisher and collector are actors of their own.
    """

    spec = RoleSpec(
        reads=("prompt", "dropped", "quarantined", "advantage"),
        writes=("dropped", "quarantined"),
        numbered={"batch": Batch, "weights": Weights, "checkpoint": Checkpoint},
        requests=("trainer_rank",),
        serves=(request_kind("trainer"),),
        removes=True,
        device=True,
        single=True,
        section="trainer",
        start_order=80,
    )

    def setup(self) -> None:
        """Build the engine, the publisher, the ledger and the readers of a step."""
        config = self.context.config
        self._settings = config.trainer
        with self.context.device_lock():
            self.engine = training_backend(config).build(self.context)
            self.context.shares_memory(self.engine)
        # `relax check` loads every role, and needs no NATS.
        from relax_actors.training.collector import Collector, Sweep, remove_void  # noqa: PLC0415

        self._ledger = ledger_of(config, has_critic=config.critic is not None)
        kinds = (kind for kind in self.context.table.numbered_kinds() if kind not in self.spec.numbered)
        others = {kind: numbered_cells().get(kind) for kind in kinds}
        collector = Collector.start(self.context, role_names(config), others)
        self._remove_void = partial(remove_void, self.context)
        self._stop_collector, self._sweep = collector.stop, partial(collector.ask, Sweep())
        self._sweep()  # before the history is read, so that a flood of strays does not fill the memory
        self._publisher = Publications(Publisher(self.context, self.engine, self._remove_void))
        self.version = -1
        self._has_trained = False
        # Fingerprints of the published weights by version.
        self._published: dict[int, str] = {}
        reader = StepReader(self.context, self._published)
        self._feed = StepFeed(self.context, self.engine, reader, proximal_score(config, self.engine))
        self._required_columns = (last_column(config), *reader.columns)
        # Indices of the rows that have a required column, by step and column.
        self._arrived: dict[int, dict[str, set[int]]] = {}
        self._malformed: list[Cell] = []
        folder, own = self.context.folder.checkpoints, self._feed.statistics
        self._checkpoints = Checkpointer(self.context, self.engine, self, "checkpoint", folder, own)
        self.figures: dict[str, float] = {}
        self._endings = RowEndings(self.context)
        self._idle_since = time.monotonic()
        self._profiles = ProfileRequests(self.context, self.engine)
        self._profiles.start()
        # Unix time when the last required column of a step was stored.
        self._last_arrival: dict[int, float] = {}

    @classmethod
    def follows(cls, config: Config) -> list[str]:
        """Return the columns that make a row ready or end it, and the trainer's numbered cells."""
        subjects, required = Subjects(config.run.name), (last_column(config), *columns_to_train(config))
        columns = [subjects.column(name) for name in ("prompt", "dropped", "quarantined", *required)]
        critic = ("critic", "critic_checkpoint") if config.critic is not None else ()
        return columns + [subjects.numbered(kind, "*") for kind in (*cls.spec.numbered, *critic)]

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Load the last checkpoint, replay the batches after it, and train the ready steps.

        Raises:
            ConfigError: the checkpoint is missing or damaged, or checkpoints exist that the table does not know.
        """
        last: Checkpoint | None = None
        for cell_id, cell in cells:
            value = self._observe(cell_id, cell)
            if isinstance(value, Checkpoint) and cell_id.kind == "checkpoint":
                last = value if last is None or value.version > last.version else last
                self._checkpoints.published[value.version] = value.path
        self._remove_malformed()
        if last is None:
            self._initialise()
        else:
            self._checkpoints.load(last)
            self.version = last.version
            # With more steps than before, steps are due that earlier incarnations did not expect.
            lead = self.context.config.staleness.max
            for version in range(max(1, self.version - lead + 1), self.version + 1):
                self._remove_void(version)
        replayed, end = 0, self.version
        while end in self._ledger.batches:
            end += 1
        if last is not None:
            self.context.journal.event("resuming", version=self.version, replays=end - self.version)
        while self.version in self._ledger.batches:
            self._replay(self.version, self._ledger.batches[self.version])
            replayed += 1
        self._publisher.ask(Restore(self.version, self._feed.statistics.kl_coefficient))
        if self.version >= self.context.config.run.steps:
            self._publisher.ask(Export())
            self._checkpoints.write(self.version)
        if replayed or last is not None:
            self.context.journal.event("recovered", version=self.version, replayed=replayed)
        self._train_ready_steps()

    def _initialise(self) -> None:
        """Initialise and warm-start the model of a new run; publish version 0 and its checkpoint."""
        config = self.context.config
        self._checkpoints.raise_if_unknown()
        with self.context.device_lock():
            self.engine.initialise(config.run.seed)
            if config.trainer.warm_start is not None:
                loss = warm_start(config, self.engine, self.progress, self.context.table.store)
                self.context.journal.event("warm_started", steps=config.trainer.warm_start.steps, loss=loss)
            self.engine.finish_warm_start()
            self.version = 0
            self._publisher.send(Publish(0, self._feed.statistics.kl_coefficient))
            self._end_publication()
        self._checkpoints.write(0)

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Record new cells, compute on the rows that have arrived, and train complete steps."""
        for cell_id, cell in cells:
            self._observe(cell_id, cell)
        self._remove_malformed()
        self._train_ready_steps()

    def idle(self) -> None:
        """Publish a pending checkpoint, and rewrite missing files of the latest weights."""
        self._checkpoints.finish()
        if self._publisher.is_idle:
            self._publisher.ask(Repair())

    def _observe(self, cell_id: CellId, cell: Cell) -> Any:
        """Record a cell; return the value of a well-formed numbered cell."""
        expected = numbered_cells().get(cell_id.kind)
        value = observe(self._ledger, self.context, cell_id, cell, expected)
        if is_oversized(cell_id, cell) or (value is None and expected is not None):
            self._malformed.append(cell)
        if isinstance(value, Weights):
            self._published[value.version] = value.fingerprint
        remaining_steps = range(max(self.version, 0), self.context.config.run.steps)
        wanted = cell_id.field in self._required_columns and cell_id.step in remaining_steps
        if wanted and not self._ledger.is_void(cell_id.row):
            self._arrived.setdefault(cell_id.step, {}).setdefault(cell_id.field, set()).add(cell_id.index)
            self._last_arrival[cell_id.step] = max(cell.stored, self._last_arrival.get(cell_id.step, 0.0))
        return value

    def _remove_malformed(self) -> None:
        """Remove malformed numbered cells, which would block the trainer's own cells."""
        self.context.table.remove(self._malformed)
        self._malformed.clear()

    def _ready(self, step: int) -> set[int]:
        """Return the indices of a step's rows that have every required column."""
        arrived = self._arrived.get(step, {})
        return set.intersection(*(arrived.get(name, set()) for name in self._required_columns))

    def _train_ready_steps(self) -> None:
        # Steps that are ready together take one turn of a shared device.
        with ExitStack() as turn:
            self._train_steps(turn)
        step = self.version
        ready = len(self._ready(step))
        self.context.report_waiting(f"rows of step {step}: {ready} of {self._ledger.rows_of(step)} are ready")

    def _train_steps(self, turn: ExitStack) -> None:
        while self.version < self.context.config.run.steps and not self.context.stopping():
            if self.version in self._ledger.batches:
                self.context.continue_turn(turn)
                self._replay(self.version, self._ledger.batches[self.version])
                continue
            if not self._feed.has_begun:
                self._profiles.begin()
            rows = self._rows_of(self.version)
            if rows is None:
                break
            self.context.continue_turn(turn)
            self._train(self.version, rows)

    def _rows_of(self, step: int) -> StepRows | None:
        """Return the step's rows once every slot has a usable one; end the unusable rows."""
        ready, size = self._ready(step), self._ledger.rows_of(step)
        candidates = self._ledger.candidates(step)
        unusable = self._feed.take(step, candidates, ready.__contains__, size)
        if self._feed.has_read_usable:
            self._endings.succeeded()
        if unusable:
            # A later incarnation may have trained and removed these rows: then they are not lost.
            self.context.raise_if_fenced()
        for index, ending in unusable.items():
            field = self._endings.end(RowId(step, index), ending)
            self._ledger.observe(CellId("group", step, index, field))
        return self._feed.complete(size)

    def _train(self, step: int, rows: StepRows) -> None:
        """Write the step's batch cell, then step on its rows; an existing batch takes precedence."""
        waited = time.monotonic() - self._idle_since - self._feed.seconds
        # Time until the last row arrived. The rest of `waited` is the trainer's own: reading rows, publishing.
        starved = min(waited, max(0.0, waited - (time.time() - self._last_arrival.get(step, 0.0))))
        batch = Batch(
            rows=rows.ids,
            seed=derive_seed(self.context.config.run.seed, "step", step),
            incarnation=self.context.incarnation,
            reward=float(np.mean([a.reward for a in rows.advantages])),
            staleness=max(rows.staleness(step)),
            tokens=rows.tokens,
            unix_time=time.time(),
            digests=rows.digests,
        )
        existing = put_own(self.context, self.context.table.subjects.numbered("batch", step), batch)
        if existing is not None:
            self._train_existing(step, existing)
            return
        self._ledger.observe(CellId("batch", step), batch)
        result = self._finish(step)
        self._idle_since = time.monotonic()
        times = {"waited_seconds": waited, "starved_seconds": starved, "train_seconds": self._feed.seconds}
        times["early_seconds"] = self._feed.early_seconds
        self._report(step, batch, rows, StepResult({**result.metrics, **times}, result.micro_batches))

    def _train_existing(self, step: int, batch: Batch) -> None:
        """Replay a step of an earlier incarnation's batch; raises FencedError for a later one."""
        if batch.incarnation > self.context.incarnation:
            mine = self.context.incarnation
            msg = f"step {step} belongs to incarnation {batch.incarnation}; this is incarnation {mine}, which exits"
            raise FencedError(msg)
        self._ledger.observe(CellId("batch", step), batch)
        self._replay(step, batch)

    def _replay(self, step: int, batch: Batch) -> None:
        """Step on the rows of an existing batch, in its order."""
        rows = self._feed.replay(step, batch.rows)
        result = self._finish(step)
        self._report(step, batch, rows, result)

    def _finish(self, step: int) -> StepResult:
        """Take the step and publish its weights, while the engine holds its device."""
        with self.context.device_lock():
            result = self._feed.finish_policy(self._publisher.flush)
            self._publish(step)
            self._end_publication()
        return result

    def _end_publication(self) -> None:
        """Wait until the weights are published, if the engine leaves its device after its turn."""
        if self.context.config.placement.leaves_device("trainer"):
            self._publisher.flush()

    def _publish(self, step: int) -> None:
        """Publish the weights of a step, and write or start a checkpoint if one is due."""
        self._profiles.end_step()
        self.version, self._has_trained = step + 1, True
        self._arrived.pop(step, None)
        self._last_arrival.pop(step, None)
        self._publisher.send(Publish(self.version, self._feed.statistics.kl_coefficient))
        self.progress()
        self._checkpoints.finish()
        if self.version == self.context.config.run.steps:
            self._publisher.ask(Export())
            self._checkpoints.write(self.version)
        elif self.version % self._settings.checkpoint_every == 0:
            self._checkpoints.start(self.version)

    def _report(self, step: int, batch: Batch, rows: StepRows, result: StepResult) -> None:
        """Publish the metric `step`; rows of data have no reward."""
        self.figures = figures_of_step(self.context.config, step, batch, rows, result.metrics)
        parts = micro_batch_figures(result.micro_batches)
        self.context.journal.metric({"kind": "step", **self.figures, **({BY_MICRO_BATCH: parts} if parts else {})})

    def before_save(self) -> None:
        """Wait until the weights of the version are published; see `Coverage`."""
        self._publisher.flush()

    def floor(self, version: int) -> tuple[int, RowCounts]:
        """Return the floor of a checkpoint, and the counts of the rows of the steps below it."""
        floor = self._ledger.next_floor(self._checkpoints.first_kept(version))
        return floor, self._ledger.totals_below(floor)

    def after_publish(self, cell: Checkpoint) -> None:
        """Record the floor of a checkpoint, and remove the rows below it."""
        self._ledger.observe(CellId("checkpoint", cell.version), cell)
        self._sweep()

    def close(self) -> None:
        """Publish a pending checkpoint if possible, then stop the collector and the publisher."""
        with suppress(RelaxError, OSError):
            self._checkpoints.finish()
        self._stop_collector()
        self._publisher.close()

    def has_worked(self, handled: int) -> bool:  # noqa: ARG002 cells that arrive prove nothing of the loss
        """Return whether this incarnation has trained a step, new or from a batch of the history."""
        return self._has_trained

    def metrics(self) -> dict[str, float]:
        """Return the version and the CPU time spent in the engine."""
        return {"version": self.version, "model_cpu_seconds": round(self._feed.cpu_seconds, 3)}
