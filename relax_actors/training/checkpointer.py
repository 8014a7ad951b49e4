"""Checkpoints of the trainer.

Invariant: the rows that a checkpoint covers are removed only after it is durable and published.

With `trainer.async_checkpoints` the files are written in the background. The checkpoint is published when the trainer
is idle, or after the next step at the latest. If the trainer ends before, it leaves an unpublished folder, and the next
incarnation resumes from the previous checkpoint.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from broker.subjects import CellId
from relax_actors.engines.protocols import TrainingEngine
from relax_actors.engines.protocols.training import SupportsAsyncSave
from relax_actors.errors import FencedError
from relax_actors.messages import Checkpoint
from relax_actors.runtime import Context, durable_folder
from relax_actors.runtime.cells import put_own
from relax_actors.training.ledger import Ledger
from relax_actors.weights.publisher import Publisher


@dataclass(frozen=True, slots=True)
class _PendingCheckpoint:
    """Checkpoint whose files are being written in the background; `finish` waits for them."""

    version: int
    path: Path
    unfinished: Path
    fingerprint: str
    finish: Callable[[], None]


class Checkpointer:
    """Writes and publishes the checkpoints of one incarnation of the trainer.

    Call all methods in the trainer's thread.

    Args:
        context: context of the trainer.
        engine: engine whose state is saved.
        publisher: publishes the version before its checkpoint is written.
        ledger: gives the floor, below which rows are covered.
        sweep: removes covered rows.

    Attributes:
        published: paths of the published checkpoints, relative to the run's folder, by version.
    """

    def __init__(
        self,
        context: Context,
        engine: TrainingEngine,
        publisher: Publisher,
        ledger: Ledger,
        sweep: Callable[[], object],
    ) -> None:
        self._sweep = sweep
        self._context, self._engine, self._publisher, self._ledger = context, engine, publisher, ledger
        self._pending: _PendingCheckpoint | None = None
        self._is_async = context.config.trainer.async_checkpoints
        self._disk_was_full = False
        self.published: dict[int, str] = {}

    def write(self, version: int) -> None:
        """Write and publish a checkpoint of the current state; wait for room on a full disk.

        Raises:
            StoreFullError: the disk stayed full for `store.patience` seconds.
            FencedError: a later incarnation has written it.
        """
        self.finish()
        if version in self.published:
            return
        self._publisher.flush()
        path = self._path(version)

        def save(folder: Path) -> None:
            self._engine.save(folder)
            durable_folder.seal(folder)

        durable_folder.write(path, save, self._context.wait_for_room)
        self._disk_was_full = False
        self._publish(version, path, self._engine.fingerprint())

    def start(self, version: int) -> None:
        """Start to write a checkpoint in the background, of the current state; `finish` publishes it.

        Falls back to `write` if trainer.async_checkpoints is off, if the engine cannot save in the background, or if
        the disk was full at the last attempt.
        """
        self.finish()
        if not (self._is_async and not self._disk_was_full and isinstance(self._engine, SupportsAsyncSave)):
            self.write(version)
            return
        if version in self.published:
            return
        self._publisher.flush()
        path = self._path(version)
        unfinished = durable_folder.temporary_path(path)
        try:
            durable_folder.create_temporary(path)
            finish = self._engine.begin_save(unfinished)
        except OSError as error:
            self._give_up(version, unfinished, error)
            self.write(version)
            return
        self._pending = _PendingCheckpoint(version, path, unfinished, self._engine.fingerprint(), finish)

    def finish(self) -> None:
        """Wait for the pending checkpoint, if there is one, and publish it.

        If the disk is full, the checkpoint is given up, and the next one is written in the foreground.

        Raises:
            FencedError: a later incarnation has written it.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.finish()
            self._context.progress()
            durable_folder.seal(pending.unfinished)
            durable_folder.commit(pending.unfinished, pending.path)
        except OSError as error:
            self._give_up(pending.version, pending.unfinished, error)
            return
        self._publish(pending.version, pending.path, pending.fingerprint)

    def _give_up(self, version: int, unfinished: Path, error: OSError) -> None:
        """Remove an unfinished checkpoint if the disk is full; raise any other error."""
        shutil.rmtree(unfinished, ignore_errors=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise error
        self._disk_was_full = True
        self._context.journal.event("checkpoint_given_up", version=version, error=str(error))

    def _path(self, version: int) -> Path:
        return self._context.folder.checkpoints / f"{version}.{self._context.incarnation}"

    def _publish(self, version: int, path: Path, fingerprint: str) -> None:
        context = self._context
        context.progress()
        # A later incarnation may still need the rows that this checkpoint would remove.
        context.raise_if_fenced()
        floor = self._ledger.next_floor(version)
        cell = Checkpoint(
            version=version,
            path=str(path.relative_to(context.folder.root)),
            fingerprint=fingerprint,
            floor=floor,
            totals=self._ledger.totals_below(floor),
            incarnation=context.incarnation,
        )
        existing = put_own(context, context.table.subjects.numbered("checkpoint", version), cell)
        if existing is not None:
            if existing.incarnation > context.incarnation:
                msg = f"checkpoint {version} was written by a later incarnation; this incarnation exits"
                raise FencedError(msg)
            cell = existing
        self._ledger.observe(CellId("checkpoint", version), cell)
        self.published[version] = cell.path
        context.journal.event("checkpoint", version=version, floor=cell.floor, path=cell.path)
        self._sweep()
        self._remove_old()
        context.progress()

    def _remove_old(self) -> None:
        """Remove all checkpoints but the newest trainer.keep_checkpoints."""
        folder, newest = self._context.folder, sorted(self.published)[-self._context.config.trainer.keep_checkpoints :]
        kept = {Path(self.published[version]).name for version in newest}
        durable_folder.remove_stale(folder.checkpoints, kept, newest[-1], self._context.incarnation)
