"""Trainer: event-sourced; its state is the last checkpoint plus the `batch` cells after it.

Step k: take the rows, write `batch.k` naming them, step, write `weights.k+1`. A new life loads the checkpoint and
steps through the batches again; with the same kernels the weights come out bit for bit the same. A cell written by
a later life than ours means that we were replaced: we end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from broker.codec import Array
from broker.errors import CodecError, RelaxError, StoreError
from broker.subjects import CellId, RowId
from broker.table import Cell
from relax_actors import checkpoint as checkpoints
from relax_actors.actor import Context, StatefulRole
from relax_actors.engines.modelled.devices import Devices
from relax_actors.engines.modelled.training import ModelledTraining
from relax_actors.engines.training import Sequences, TrainBatch, TrainingEngine
from relax_actors.errors import ConfigError, FencedError
from relax_actors.ledger import Ledger
from relax_actors.messages import Advantage, Batch, Checkpoint, Dropped, DropReason, Trajectory, Weights
from relax_actors.roles.publish import Publisher
from relax_actors.roles.reading import observe, read_logprobs
from relax_actors.roles.seeds import seed_of
from relax_actors.roles.warm_start import warm_start

PROXIMAL = "actor_fwd"
"""The column of the proximal policy's log-probs, `[total] float32`, where algorithm.proximal asks for it."""


def make_engine(context: Context) -> TrainingEngine:
    """The training engine of a run."""
    config = context.config
    if config.simulate is not None:
        return ModelledTraining(config, Devices(config.simulate, context.folder.root))
    import torch  # noqa: PLC0415 only the process that trains pays for it

    from relax_actors.engines.training.torch_engine import TorchEngine  # noqa: PLC0415

    torch.set_num_threads(config.run.threads)
    if config.trainer.backend == "torch":
        return TorchEngine(config)
    msg = f"trainer.backend {config.trainer.backend!r} is not known"
    raise ConfigError(msg)


@dataclass(slots=True)
class _Rows:
    """The rows of a step as the trainer needs them."""

    ids: list[int]
    trajectories: list[Trajectory]
    advantages: list[Advantage]
    proximal: list[Array] | None = None

    def batch(self) -> TrainBatch:
        """All samples, row after row."""
        prompts: list[Array] = []
        completions: list[Array] = []
        logprobs: list[Array] = []
        for trajectory in self.trajectories:
            for sample in trajectory.samples:
                prompts.append(trajectory.prompt_tokens)
                completions.append(sample.tokens)
                logprobs.append(sample.logprobs)
        values = np.concatenate([a.values for a in self.advantages]).astype(np.float32)
        proximal = None
        if self.proximal is not None:
            pairs = zip(self.proximal, self.trajectories, strict=True)
            proximal = [part for array, t in pairs for part in np.split(array, np.cumsum(t.lengths)[:-1])]
        return TrainBatch(Sequences(prompts, completions), logprobs, values, proximal)

    @property
    def oldest(self) -> int:
        """The oldest version that wrote a token."""
        return min(self.oldest_of_rows)

    @property
    def oldest_of_rows(self) -> list[int]:
        """The oldest version that wrote a token, of each row."""
        return [int(t.versions.min()) for t in self.trajectories if len(t.versions)]

    @property
    def newest(self) -> int:
        """The newest version that wrote a token."""
        return max(int(t.versions.max()) for t in self.trajectories if len(t.versions))


class Trainer(StatefulRole):
    """Owns the weights."""

    writes = "batch"

    def setup(self) -> None:
        """Build the engine."""
        config = self.context.config
        self._settings = config.trainer
        self._engine = make_engine(self.context)
        self._ledger = Ledger(config.trainer.rows, config.run.steps, config.staleness.max)
        self._publisher = Publisher(self.context, self._engine)
        self._version = -1
        self._ready: dict[int, dict[int, bytes]] = {}
        self._scores = config.algorithm.proximal == PROXIMAL
        self._scored: dict[int, set[int]] = {}
        self._checkpoints: dict[int, str] = {}
        self._metrics: dict[str, float] = {}
        self._waited_since = time.monotonic()
        self._completed: dict[int, float] = {}
        self._model_seconds = 0.0

    def follows(self) -> list[str]:
        """Rows that are ready or ended, and what the trainer itself announced in earlier lives."""
        subjects = self.context.table.subjects
        columns = [subjects.column(name) for name in ("prompt", "advantage", "dropped", "quarantined")]
        columns += [subjects.column(PROXIMAL)] * self._scores
        return columns + [subjects.numbered(kind, "*") for kind in ("batch", "weights", "checkpoint")]

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Load the last checkpoint, step through the batches after it, go on."""
        last: Checkpoint | None = None
        purged = 0
        for cell_id, cell in cells:
            self._take(cell_id, cell)
            if cell_id.kind == "checkpoint":
                found = self.context.table.read(cell.data, Checkpoint)
                purged = last.floor if last is not None else 0
                last = found if last is None or found.version > last.version else last
                self._checkpoints[found.version] = found.path
        if last is None:
            self._begin()
        else:
            folder = self.context.folder.root / last.path
            if not folder.is_dir():
                msg = f"checkpoint {folder} is announced but missing; restore it, or start a run of another name"
                raise ConfigError(msg)
            try:
                self._engine.load(folder)
            except (RelaxError, OSError, ValueError, LookupError, RuntimeError) as error:
                msg = f"checkpoint {folder} cannot be read: {error}; restore it, or start a run of another name"
                raise ConfigError(msg) from error
            self._version = last.version
            if (found_print := self._engine.fingerprint()) != last.fingerprint:
                msg = f"checkpoint {folder} is corrupt: its fingerprint is {found_print}, announced {last.fingerprint}"
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
            self._checkpoint()
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
            loss = warm_start(config, self._engine, self.progress)
            self.context.journal.event("warm_started", steps=config.trainer.warm_start.steps, loss=loss)
        self._engine.finish_warm_start()
        self._version = 0
        self._publisher.announce(0)
        self._checkpoint()

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Take cells in; step while a step's rows are all there."""
        for cell_id, cell in cells:
            self._take(cell_id, cell)
        self._advance()

    def idle(self) -> None:
        """See that the weights in use are there."""
        self._publisher.look_after()

    def _take(self, cell_id: CellId, cell: Cell) -> None:
        observe(self._ledger, self.context, cell_id, cell)
        if cell_id.field == "advantage" and cell_id.step >= max(self._version, 0):
            self._ready.setdefault(cell_id.step, {})[cell_id.index] = cell.data
            self._completed[cell_id.step] = max(cell.stored, self._completed.get(cell_id.step, 0.0))
        elif cell_id.field == PROXIMAL and cell_id.step >= max(self._version, 0):
            self._scored.setdefault(cell_id.step, set()).add(cell_id.index)

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
        ready = len(self._ready.get(step, {}))
        self.context.waits_for(f"rows of step {step}: {ready} of {self._settings.rows} are ready")

    def _rows_of(self, step: int) -> _Rows | None:
        """The step's rows, one a slot, if all are there and usable; rows that are not are dropped."""
        candidates = self._ledger.candidates(step)
        ready = self._ready.get(step, {})
        if len(candidates) < self._settings.rows or not all(i in ready for i in candidates.values()):
            return None
        if self._scores and not self._scored.get(step, set()).issuperset(candidates.values()):
            return None
        indices = [candidates[slot] for slot in sorted(candidates)]
        lost: list[tuple[int, DropReason, str]] = []
        rows = _Rows([], [], [])
        for index, trajectory in zip(indices, self._trajectories(step, indices), strict=True):
            if isinstance(trajectory, RelaxError):
                lost.append((index, DropReason.LOST_SEGMENT, str(trajectory)))
                continue
            advantage = self.context.table.read(ready[index], Advantage)
            if len(advantage.values) != len(trajectory.lengths) or not len(trajectory.tokens):
                detail = f"{len(advantage.values)} advantages for {len(trajectory.lengths)} samples"
                lost.append((index, DropReason.UNUSABLE, f"{detail} of {len(trajectory.tokens)} tokens"))
                continue
            age = step - int(trajectory.versions.min())
            staleness = self.context.config.staleness
            if age > staleness.max and staleness.policy == "drop":
                lost.append((index, DropReason.TOO_OLD, f"age {age} is over staleness.max"))
                continue
            rows.ids.append(index)
            rows.trajectories.append(trajectory)
            rows.advantages.append(advantage)
        if self._scores:
            rows.proximal, bad = read_logprobs(self.context.table, PROXIMAL, step, rows.ids, rows.trajectories)
            lost += [(index, DropReason.UNUSABLE, detail) for index, detail in bad]
        if lost:
            # Or a later life of the trainer is through with them.
            self.context.give_way()
        for index, reason, detail in lost:
            self._drop(RowId(step, index), reason, detail)
        return None if lost else rows

    def _trajectories(self, step: int, indices: list[int]) -> list[Trajectory | RelaxError]:
        table = self.context.table
        cells = table.get_all(table.cell(RowId(step, i), "trajectory") for i in indices)
        found: list[Trajectory | RelaxError] = []
        for index, cell in zip(indices, cells, strict=True):
            try:
                if cell is None:
                    msg = f"cell group.{step}.{index}.trajectory is gone"
                    raise StoreError(msg)  # noqa: TRY301 one way for all that is lost
                found.append(table.read(cell.data, Trajectory))
            except (StoreError, CodecError) as error:
                found.append(error)
        return found

    def _drop(self, row: RowId, reason: DropReason, detail: str) -> None:
        table = self.context.table
        table.put(table.cell(row, "dropped"), Dropped(reason, detail))
        self.context.journal.event("row_dropped", row=str(row), reason=reason, detail=detail)
        self._ledger.observe(CellId("group", row.step, row.index, "dropped"))

    def _train(self, step: int, rows: _Rows) -> None:
        waited = time.monotonic() - self._waited_since
        # Of it, what passed until the last row was there; the rest is reading the rows, and whatever else is ours.
        starved = min(waited, max(0.0, waited - (time.time() - self._completed.get(step, 0.0))))
        batch = Batch(
            rows=rows.ids,
            seed=seed_of(self.context.config.run.seed, "step", step),
            incarnation=self.context.incarnation,
            reward=float(np.mean([a.reward for a in rows.advantages])),
            age=step - rows.oldest,
            tokens=int(sum(len(t.tokens) for t in rows.trajectories)),
            unix_time=time.time(),
        )
        table = self.context.table
        subject = table.subjects.numbered("batch", step)
        if not table.put(subject, batch):
            self._adopt(step, subject)
            return
        self._ledger.observe(CellId("batch", step), batch)
        start, began = time.monotonic(), time.thread_time()
        result = self._engine.step(rows.batch(), step, self.progress)
        trained = time.monotonic()
        self._model_seconds += time.thread_time() - began
        self._finish(step)
        self._waited_since = time.monotonic()
        times = {"waited_seconds": waited, "starved_seconds": starved, "train_seconds": trained - start}
        self._report(step, batch, rows, {**result.metrics, **times})

    def _adopt(self, step: int, subject: str) -> None:
        """The step's batch is there already: an earlier life's is replayed, before a later life's we give way."""
        batch = self.context.table.fetch(subject, Batch)
        if batch is None or batch.incarnation > self.context.incarnation:
            by = "a purged step" if batch is None else f"incarnation {batch.incarnation}"
            msg = f"step {step} belongs to {by}; this is incarnation {self.context.incarnation}, which gives way"
            raise FencedError(msg)
        self._ledger.observe(CellId("batch", step), batch)
        self._replay(step, batch)

    def _replay(self, step: int, batch: Batch) -> None:
        """Step through a batch that an earlier life had written."""
        table = self.context.table
        cells = table.get_all(table.cell(RowId(step, i), "advantage") for i in batch.rows)
        rows = _Rows(list(batch.rows), [], [])
        for index, cell, trajectory in zip(batch.rows, cells, self._trajectories(step, batch.rows), strict=True):
            if isinstance(trajectory, RelaxError) or cell is None:
                msg = f"step {step} cannot be replayed: row {index} is lost ({trajectory}); restore the store's folder"
                raise ConfigError(msg)
            rows.trajectories.append(trajectory)
            rows.advantages.append(table.read(cell.data, Advantage))
        if self._scores:
            rows.proximal, bad = read_logprobs(table, PROXIMAL, step, rows.ids, rows.trajectories)
            if bad:
                msg = f"step {step} cannot be replayed: row {bad[0][0]}: {bad[0][1]}; restore the store's folder"
                raise ConfigError(msg)
        result = self._engine.step(rows.batch(), step, self.progress)
        self._finish(step)
        self._report(step, batch, rows, result.metrics)

    def _finish(self, step: int) -> None:
        """Announce what a step made."""
        self._version = step + 1
        self._ready.pop(step, None)
        self._scored.pop(step, None)
        self._completed.pop(step, None)
        self._publisher.announce(self._version)
        self.progress()
        steps = self.context.config.run.steps
        if self._version == steps:
            self._publisher.export()
        if self._version % self._settings.checkpoint_every == 0 or self._version == steps:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Write a checkpoint, announce it, and only then let go of the rows that it covers."""
        version = self._version
        if version in self._checkpoints:
            return
        path = self.context.folder.checkpoints / f"{version}.{self.context.incarnation}"
        checkpoints.write(path, self._engine.save, self.context.wait_for_room)
        self.progress()
        old, floor = self._ledger.floor, self._ledger.next_floor(version)
        cell = Checkpoint(
            version=version,
            path=str(path.relative_to(self.context.folder.root)),
            fingerprint=self._engine.fingerprint(),
            floor=floor,
            totals=self._ledger.totals_below(floor),
            incarnation=self.context.incarnation,
        )
        table = self.context.table
        subject = table.subjects.numbered("checkpoint", version)
        if not table.put(subject, cell):
            found = table.fetch(subject, Checkpoint)
            if found is None or found.incarnation > self.context.incarnation:
                msg = f"checkpoint {version} was written by a later life; this one gives way"
                raise FencedError(msg)
            cell = found
        self._ledger.observe(CellId("checkpoint", version), cell)
        self._checkpoints[version] = cell.path
        self.context.journal.event("checkpoint", version=version, floor=cell.floor, path=cell.path)
        self._publisher.purge(old, cell.floor)
        self._collect_checkpoints()
        self.progress()

    def _collect_checkpoints(self) -> None:
        folder, newest = self.context.folder, sorted(self._checkpoints)[-self._settings.keep_checkpoints :]
        kept = {Path(self._checkpoints[version]).name for version in newest}
        checkpoints.collect(folder.checkpoints, kept, newest[-1], self.context.incarnation)

    def _report(self, step: int, batch: Batch, rows: _Rows, measured: Mapping[str, float]) -> None:
        self._metrics = {
            "step": step,
            "reward": round(batch.reward, 5),
            "age": batch.age,
            "age_mean": round(step - float(np.mean(rows.oldest_of_rows)), 4),
            "span": rows.newest - rows.oldest,
            "stale_rows": sum(
                step - int(t.versions.min()) > self.context.config.staleness.max
                for t in rows.trajectories
                if len(t.versions)
            ),
            "waited_seconds": 0.0,
            "train_seconds": 0.0,
            **{name: round(float(value), 6) for name, value in measured.items()},
        }
        self.context.journal.metric({"kind": "step", **self._metrics})

    def metrics(self) -> dict[str, float]:
        """The version, and the last step's figures."""
        return {"version": self._version, "model_cpu_seconds": round(self._model_seconds, 3)}


__all__ = ["Trainer", "Weights"]
