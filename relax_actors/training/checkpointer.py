"""Checkpoints of the trainer: written, published, and only then are the rows let go that they cover.

With `trainer.async_checkpoints` one is only begun at its step, and published when nothing is to be done, after the next
step at the latest: its files are written meanwhile. A life that ends in between leaves a folder that nobody published;
the next goes on from the checkpoint before.
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
from relax_actors.runtime import Context
from relax_actors.runtime import durable_folder as checkpoints
from relax_actors.runtime.cells import put_own
from relax_actors.training.ledger import Ledger
from relax_actors.weights.publisher import Publisher


@dataclass(frozen=True, slots=True)
class _Begun:
    """A checkpoint whose files are being written: `finish` waits for them."""

    version: int
    path: Path
    unfinished: Path
    fingerprint: str
    finish: Callable[[], None]


class Checkpointer:
    """Writes the checkpoints of one life of the trainer; for its thread only.

    Args:
        context: the trainer's.
        engine: what is saved.
        publisher: settled before, and told to let rows go after.
        ledger: knows which.
    """

    def __init__(self, context: Context, engine: TrainingEngine, publisher: Publisher, ledger: Ledger) -> None:
        self._context, self._engine, self._publisher, self._ledger = context, engine, publisher, ledger
        self._begun: _Begun | None = None
        self._meanwhile = context.config.trainer.async_checkpoints
        self._there_is_room = True
        self.known: dict[int, str] = {}
        """Those that were published: their paths in the run's folder, by version."""

    def write(self, version: int) -> None:
        """Write one of this moment and publish it; waits for room on a full disk.

        Raises:
            StoreFullError: there was none for too long.
            FencedError: a later life has written it.
        """
        self.finish()
        if version in self.known:
            return
        self._publisher.flush()
        path = self._path(version)

        def save(folder: Path) -> None:
            self._engine.save(folder)
            checkpoints.seal(folder)

        checkpoints.write(path, save, self._context.wait_for_room)
        self._there_is_room = True
        self._publish(version, path, self._engine.fingerprint())

    def begin(self, version: int) -> None:
        """Begin one of this moment, for `finish`; where that cannot be, as `write`."""
        self.finish()
        if not (self._meanwhile and self._there_is_room and isinstance(self._engine, SupportsAsyncSave)):
            self.write(version)
            return
        if version in self.known:
            return
        self._publisher.flush()
        path = self._path(version)
        unfinished = checkpoints.temporary_path(path)
        try:
            checkpoints.create_temporary(path)
            finish = self._engine.begin_save(unfinished)
        except OSError as error:
            self._without_room(version, unfinished, error)
            self.write(version)
            return
        self._begun = _Begun(version, path, unfinished, self._engine.fingerprint(), finish)

    def finish(self) -> None:
        """Publish the one that was begun, if there is one.

        On a full disk it is given up, and the next is written while all else waits.

        Raises:
            FencedError: a later life has written it.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return
        try:
            begun.finish()
            self._context.progress()
            checkpoints.seal(begun.unfinished)
            checkpoints.commit(begun.unfinished, begun.path)
        except OSError as error:
            self._without_room(begun.version, begun.unfinished, error)
            return
        self._publish(begun.version, begun.path, begun.fingerprint)

    def _without_room(self, version: int, unfinished: Path, error: OSError) -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise error
        self._there_is_room = False
        self._context.journal.event("checkpoint_given_up", version=version, error=str(error))

    def _path(self, version: int) -> Path:
        return self._context.folder.checkpoints / f"{version}.{self._context.incarnation}"

    def _publish(self, version: int, path: Path, fingerprint: str) -> None:
        context = self._context
        context.progress()
        # Of a later life, which may still need the rows.
        context.raise_if_fenced()
        old, floor = self._ledger.floor, self._ledger.next_floor(version)
        cell = Checkpoint(
            version=version,
            path=str(path.relative_to(context.folder.root)),
            fingerprint=fingerprint,
            floor=floor,
            totals=self._ledger.totals_below(floor),
            incarnation=context.incarnation,
        )
        found = put_own(context, context.table.subjects.numbered("checkpoint", version), cell)
        if found is not None:
            if found.incarnation > context.incarnation:
                msg = f"checkpoint {version} was written by a later incarnation; this incarnation exits"
                raise FencedError(msg)
            cell = found
        self._ledger.observe(CellId("checkpoint", version), cell)
        self.known[version] = cell.path
        context.journal.event("checkpoint", version=version, floor=cell.floor, path=cell.path)
        self._publisher.purge(old, cell.floor)
        self._collect()
        context.progress()

    def _collect(self) -> None:
        folder, newest = self._context.folder, sorted(self.known)[-self._context.config.trainer.keep_checkpoints :]
        kept = {Path(self.known[version]).name for version in newest}
        checkpoints.remove_stale(folder.checkpoints, kept, newest[-1], self._context.incarnation)
