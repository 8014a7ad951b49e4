"""Role `critic`: values of the tokens of each row, and the value model that computes them.

Invariant: the state is a function of the last checkpoint of the critic and the `batch` cells after it, as the trainer's
is. Version k is the critic before the batch of step k. Values of a row of step k are written by a version that is at
most staleness.max below k; on-policy this is exactly version k, however often the actor is killed. The trainer keeps
the rows of a step until a checkpoint of the critic covers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from broker.codec import Array
from broker.subjects import CellId, RowId, Subjects
from relax_actors.algorithms.micro_batches import split_rows
from relax_actors.config import Config
from relax_actors.data.checked_run import CheckedRun
from relax_actors.engines.backends import critic_backend, critic_section
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.errors import ConfigError, FencedError, RelaxError
from relax_actors.messages import Batch, Checkpoint, CriticVersion, Quarantined, RowCounts, Trajectory, Weights
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.roles.registry import numbered_cells
from relax_actors.runtime import StatefulRole, durable_folder
from relax_actors.runtime.cells import put_own, read_column, read_numbered
from relax_actors.training.checkpointer import Checkpointer
from relax_actors.training.row_endings import RowEndings, ending_of_unreadable
from relax_actors.training.row_media import RowMedia
from relax_actors.training.samples import computed_lengths, in_layout, samples_of
from relax_actors.training.step_feed import StepFeed
from relax_actors.training.step_rows import StepReader
from relax_actors.training.validation import RowValidator

if TYPE_CHECKING:
    from broker.table import Cell

ENDED = ("dropped", "quarantined", "values")
"""Columns after which a row needs no values."""


class Critic(StatefulRole):
    """Writes values of rows, and trains on the trainer's batches in the same order.

    The column `values` is `[total] float32` in the layout of the trajectory: the expected return of the state before
    each trained token, 0 elsewhere. All methods but `metrics` run in the role's thread.
    """

    writes = "values"
    spec = RoleSpec(
        reads=("trajectory", "advantage", *ENDED),
        writes=("values", "dropped", "quarantined"),
        numbered={"critic": CriticVersion, "critic_checkpoint": Checkpoint},
        device=True,
        single=True,
        section="critic",
        requires="critic",
        start_order=75,
    )

    def check(self, run: CheckedRun) -> Iterator[str]:
        """Check that the critic can be built, and that its folder fits the policy's tokens."""
        from relax_actors.roles.critic_check import check_critic  # noqa: PLC0415 only a check needs it

        if run.model is not None:
            yield from check_critic(critic_section(run.config), run.config, run.model)

    def setup(self) -> None:
        """Build the engine and the readers of a step."""
        context, config = self.context, self.context.config
        self._settings = critic_section(config)
        with context.device_lock():
            self.engine = critic_backend(self._settings).build(context)
            context.shares_memory(self.engine)
        self._feed = StepFeed(context, self.engine, StepReader(context, {}), section="critic")
        self._validator = RowValidator(config)
        self._media = None if config.media is None else RowMedia(context)
        self._endings = RowEndings(context)
        folder = context.folder.critic_checkpoints
        self._checkpoints = Checkpointer(context, self.engine, self, "critic_checkpoint", folder)
        self.version = -1
        self._batches: dict[int, Batch] = {}
        # Indices of the rows that wait for values, and of those that need none, by step.
        self._waiting: dict[int, set[int]] = {}
        self._ended: dict[int, set[int]] = {}
        self._weights: Weights | None = None
        self.figures: dict[str, float] = {}

    @classmethod
    def follows(cls, config: Config) -> list[str]:
        """Return columns before and behind values, version 0 of the policy, and numbered cells."""
        subjects = Subjects(config.run.name)
        columns = [subjects.column(name) for name in ("trajectory", *ENDED)]
        numbered = [subjects.numbered(kind, "*") for kind in ("batch", *cls.spec.numbered)]
        return [*columns, *numbered, subjects.numbered("weights", 0)]

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Load the last checkpoint, replay the batches after it, and write the values that are due.

        Raises:
            ConfigError: the checkpoint is missing or damaged, or checkpoints exist that the table does not know.
        """
        last: Checkpoint | None = None
        for cell_id, cell in cells:
            value = self._observe(cell_id, cell)
            if isinstance(value, Checkpoint):
                last = value if last is None or value.version > last.version else last
                self._checkpoints.published[value.version] = value.path
        if last is None:
            self._checkpoints.raise_if_unknown()
        else:
            self._checkpoints.load(last)
            self._begin(last.version)
            if last.version >= self.context.config.run.steps:
                # With fewer steps than before, the run ends at a checkpoint that was not the last one.
                self._finish_run()
        self._advance()
        if last is not None:
            self.context.journal.event("recovered", version=self.version, replayed=self.version - last.version)

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Record new cells; train on new batches, and write the values that are due."""
        for cell_id, cell in cells:
            self._observe(cell_id, cell)
        self._advance()

    def idle(self) -> None:
        """Publish a pending checkpoint."""
        self._checkpoints.finish()

    def _observe(self, cell_id: CellId, cell: Cell) -> Checkpoint | None:
        """Record a cell; return a valid checkpoint of the critic."""
        if cell_id.kind == "group":
            if cell_id.field == "trajectory":
                self._waiting.setdefault(cell_id.step, set()).add(cell_id.index)
            else:
                self._ended.setdefault(cell_id.step, set()).add(cell_id.index)
            return None
        expected = numbered_cells().get(cell_id.kind)
        value = None if expected is None else read_numbered(self.context, cell, expected)
        if isinstance(value, Batch):
            self._batches[cell_id.step] = value
        elif isinstance(value, Weights):
            self._weights = value
        return value if isinstance(value, Checkpoint) else None

    def _advance(self) -> None:
        """Train on all batches that are there, then write all values that are due."""
        if self.version < 0 and not self._initialise():
            self.context.report_waiting("version 0 of the policy")
            return
        while not self.context.stopping():
            if (batch := self._batches.get(self.version)) is not None:
                self._train(batch)
            elif not self._write_due_values():
                break
        self.context.report_waiting(f"rows or batch of step {self.version}")

    def _initialise(self) -> bool:
        """Initialise a new run's critic and publish version 0; False if weights 0 are due."""
        if self._settings.path is None and self._weights is None:
            return False
        policy = None if self._weights is None or self._settings.path is not None else self._policy(self._weights)
        with self.context.device_lock():
            self.engine.initialise(policy)
        self._publish(0)
        self._checkpoints.write(0)
        self._begin(0)
        return True

    def _policy(self, cell: Weights) -> list[Path]:
        """Files of version 0 of the policy in the store, after a check of their fingerprint."""
        from relax_actors.weights import files  # noqa: PLC0415 imports torch, for the critic's process only

        paths = [self.context.table.store.path(shard.path) for shard in cell.shards]
        if (stored := files.fingerprint(files.load(paths))) != cell.fingerprint:
            msg = f"weights 0 in the store have fingerprint {stored}, published was {cell.fingerprint}; restore them"
            raise ConfigError(msg)
        return paths

    def _begin(self, version: int) -> None:
        """Continue with a version; forget what is below it."""
        self.version = version
        for by_step in (self._batches, self._waiting, self._ended):
            for step in [step for step in by_step if step < version]:
                del by_step[step]

    def _train(self, batch: Batch) -> None:
        """Update the critic with a batch, and publish the next version."""
        step = self.version
        rows = self._feed.replay(step, batch.rows)
        with self.context.device_lock():  # the fingerprint is read before the memory leaves
            result = self._feed.finish(lambda: None)
            self._begin(step + 1)
            self._publish(self.version)
        self.progress()
        self._checkpoints.finish()
        if self.version == self.context.config.run.steps:
            self._finish_run()
        elif self.version % self.context.config.trainer.checkpoint_every == 0:
            self._checkpoints.start(self.version)
        measured = {name: round(float(value), 6) for name, value in result.metrics.items()}
        self.figures = {"step": step, "rows": len(rows), "train_seconds": round(self._feed.seconds, 6), **measured}
        self.context.journal.metric({"kind": "critic", **self.figures})

    def _publish(self, version: int) -> None:
        """Publish the fingerprint of a version, or compare it with the published one.

        Raises:
            FencedError: a later incarnation published it.
            ConfigError: with run.deterministic, the replayed weights differ from the published ones.
        """
        context = self.context
        cell = CriticVersion(version, self.engine.fingerprint(), context.incarnation)
        known = put_own(context, context.table.subjects.numbered("critic", version), cell)
        if known is None or known == cell:
            return
        if known.incarnation > context.incarnation:
            msg = f"critic {version} was published by a later incarnation; this one exits"
            raise FencedError(msg)
        if (fingerprint := cell.fingerprint) != known.fingerprint:
            context.journal.event("replay_diverged", version=version, published=known.fingerprint, found=fingerprint)
            if context.config.run.deterministic:
                msg = f"critic {version} of the replay has fingerprint {fingerprint}, published was {known.fingerprint}"
                raise ConfigError(msg)

    def _finish_run(self) -> None:
        """Write the trained critic and the last checkpoint."""
        context = self.context
        durable_folder.write(context.folder.critic, self.engine.export, context.wait_for_room)
        self._checkpoints.write(self.version)

    def _write_due_values(self) -> bool:
        """Compute and write the values of the rows that are due; return whether there were any."""
        config = self.context.config
        due = [
            RowId(step, index)
            for step in range(self.version, min(self.version + config.staleness.max, config.run.steps - 1) + 1)
            for index in sorted(self._waiting.pop(step, set()) - self._ended.get(step, set()))
        ]
        if not due:
            return False
        trajectories = read_column(self.context.table, due, "trajectory", Trajectory)
        rows = [
            (row, value)
            for row, value in zip(due, trajectories, strict=True)
            if isinstance(value, Trajectory) and not self._validator.of_trajectory(value, row.step)
        ]
        if len(rows) < len(due):
            self._end_unusable(due, trajectories)
        if rows:
            self._endings.succeeded()
        shares = config.trainer.shares_prefixes
        lengths = [computed_lengths(trajectory, share_prefixes=shares) for _, trajectory in rows]
        max_tokens = 1 if config.run.deterministic else config.trainer.max_tokens_per_microbatch
        with ExitStack() as turn:
            for part in split_rows(lengths, max_tokens=max_tokens):
                self.context.continue_turn(turn)
                self._write_values(rows[part.start : part.stop])
        return True

    def _end_unusable(self, due: list[RowId], trajectories: Sequence[Trajectory | RelaxError]) -> None:
        # A later incarnation may have trained on these rows, and the trainer may have removed them.
        self.context.raise_if_fenced()
        for row, value in zip(due, trajectories, strict=True):
            if isinstance(value, RelaxError):
                self._endings.end(row, ending_of_unreadable("critic", value))
            elif why := self._validator.of_trajectory(value, row.step):
                self._endings.end(row, Quarantined("critic", 1, why, ""))

    def _write_values(self, rows: list[tuple[RowId, Trajectory]]) -> None:
        table, samples = self.context.table, []
        media: list[Any] = [None] * len(rows)
        if self._media is not None:
            media = self._media.read([row for row, _ in rows], [trajectory for _, trajectory in rows])
            rows, media = self._without_lost_media(rows, media)
        for n, ((_, trajectory), of_row) in enumerate(zip(rows, media, strict=True)):
            samples += samples_of(n, trajectory, media=of_row)
        with self.context.device_lock():
            scored = iter(self.engine.values(samples, self.progress))
        cells: list[tuple[str, Array]] = [
            (table.subject(row, "values"), np.asarray(in_layout(trajectory, scored))) for row, trajectory in rows
        ]
        table.put_all(cells)
        self.progress()

    def _without_lost_media(
        self, rows: list[tuple[RowId, Trajectory]], media: list[list[PromptMedia] | RelaxError]
    ) -> tuple[list[tuple[RowId, Trajectory]], list[list[PromptMedia]]]:
        """End the rows whose media cannot be read; return the others and their media."""
        lost = {row: part for (row, _), part in zip(rows, media, strict=True) if isinstance(part, RelaxError)}
        if lost:
            self._end_unusable(list(lost), list(lost.values()))
        kept = [part for part in media if not isinstance(part, RelaxError)]
        return [(row, value) for row, value in rows if row not in lost], kept

    def before_save(self) -> None:
        """Nothing to wait for: a version is published before its checkpoint; see `Coverage`."""

    def floor(self, version: int) -> tuple[int, RowCounts]:
        """Cover the rows below a version, which the trainer counts and removes; see `Coverage`."""
        return version, RowCounts()

    def after_publish(self, cell: Checkpoint) -> None:
        """Remove nothing: the trainer does; see `Coverage`."""

    def close(self) -> None:
        """Publish a pending checkpoint if possible."""
        with suppress(RelaxError, OSError):
            self._checkpoints.finish()

    def metrics(self) -> dict[str, float]:
        """Return the version and the CPU time spent in the engine."""
        return {"version": self.version, "model_cpu_seconds": round(self._feed.cpu_seconds, 3)}
