"""Checkpoints of the trainer and of the critic.

Invariant: the rows that a checkpoint covers are removed only after it is durable and published.

With `trainer.async_checkpoints` the files are written in the background. The checkpoint is published when the role is
idle, or after the next step at the latest. If its process ends before, it leaves an unpublished folder, and the next
incarnation resumes from the previous checkpoint.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from relax_actors.engines.backends import critic_section
from relax_actors.engines.protocols.training import SavesState, SupportsAsyncSave
from relax_actors.errors import ConfigError, FencedError, RelaxError
from relax_actors.messages import Checkpoint, RowCounts
from relax_actors.runtime import Context, durable_folder
from relax_actors.runtime.cells import put_own


@dataclass(frozen=True, slots=True)
class _PendingCheckpoint:
    """Checkpoint whose files are being written in the background; `finish` waits for them."""

    version: int
    path: Path
    unfinished: Path
    fingerprint: str
    finish: Callable[[], None]


class Coverage(Protocol):
    """Rows that a checkpoint makes superfluous."""

    def before_save(self) -> None:
        """Prepare a save: the version's numbered cell must be published when it returns."""

    def floor(self, version: int) -> tuple[int, RowCounts]:
        """Return the floor of a checkpoint, and the counts of the rows below it."""

    def after_publish(self, cell: Checkpoint) -> None:
        """Called when a checkpoint is published: the rows that it covers may be removed."""


class RoleState(Protocol):
    """State of a role beside that of its engine."""

    def save(self, folder: Path) -> None:
        """Write the state into the folder of a checkpoint, which has the files of the engine, too."""

    def load(self, folder: Path) -> None:
        """Read the state of a checkpoint."""


def load_checkpoint(folder: Path, checkpoint: Checkpoint, engine: SavesState, state: RoleState | None) -> None:
    """Load a published checkpoint into an engine, and check its fingerprint.

    `state` is the state of the role beside that of the engine, if it has any.

    Raises:
        ConfigError: it is missing or damaged.
    """
    remedy = "restore it, or start a run with another name"
    if not folder.is_dir():
        msg = f"checkpoint {folder} is published but missing; {remedy}"
        raise ConfigError(msg)
    try:
        durable_folder.verify(folder)
        engine.load(folder)
        if state is not None:
            state.load(folder)
    except (RelaxError, OSError, ValueError, LookupError, RuntimeError) as error:
        msg = f"checkpoint {folder} cannot be read: {error}; {remedy}"
        raise ConfigError(msg) from error
    if (fingerprint := engine.fingerprint()) != checkpoint.fingerprint:
        msg = f"checkpoint {folder} has fingerprint {fingerprint}, published was {checkpoint.fingerprint}; {remedy}"
        raise ConfigError(msg)


class Checkpointer:
    """Writes and publishes the checkpoints of one incarnation of the trainer or critic.

    Call all methods in the role's thread. Checkpoints cover the rows of `coverage`; `kind` is that of the numbered
    cells, and `state` the role's beside that of the engine, if it has any. `published` has the paths of the published
    checkpoints, relative to the run's folder, by version.
    """

    def __init__(
        self,
        context: Context,
        engine: SavesState,
        coverage: Coverage,
        kind: str,
        folder: Path,
        state: RoleState | None = None,
    ) -> None:
        self._context, self._engine, self._coverage, self._state = context, engine, coverage, state
        self._kind, self._folder = kind, folder
        self._pending: _PendingCheckpoint | None = None
        self._is_async = context.config.trainer.async_checkpoints
        self._disk_was_full = False
        self.published: dict[int, str] = {}

    def raise_if_unknown(self) -> None:
        """Check at a run's start that the folder holds no checkpoints; raises ConfigError."""
        if older := [p.name for p in self._folder.glob("[1-9]*")] if self._folder.is_dir() else []:
            msg = (
                f"{self._folder} holds checkpoints {sorted(older)} that the table does not know: the broker's store "
                "was lost or replaced. Restore the store, or move the folder away to start from the beginning"
            )
            raise ConfigError(msg)

    def load(self, checkpoint: Checkpoint) -> None:
        """Load a published checkpoint and check its fingerprint; raises ConfigError."""
        folder = self._context.folder.root / checkpoint.path
        with self._context.device_lock():
            load_checkpoint(folder, checkpoint, self._engine, self._state)

    def first_kept(self, version: int) -> int:
        """Return the first checkpoint to keep once `version` is the newest; see `run.keep_steps`.

        The rows of the steps from it on are kept, too, or the checkpoint would be of no use.
        """
        wanted = version - self._context.config.run.keep_steps
        return max((known for known in {*self.published, version} if known <= wanted), default=0)

    def write(self, version: int) -> None:
        """Write and publish a checkpoint of the current state; wait for room on a full disk.

        Raises:
            StoreFullError: the disk stayed full for `store.patience` seconds.
            FencedError: a later incarnation has written it.
        """
        self.finish()
        if version in self.published:
            return
        self._coverage.before_save()
        path = self._path(version)

        def save(folder: Path) -> None:
            with self._context.device_lock():
                self._engine.save(folder)
            if self._state is not None:
                self._state.save(folder)
            durable_folder.seal(folder)

        durable_folder.write(path, save, self._context.wait_for_room)
        self._disk_was_full = False
        self._publish(version, path, self._engine.fingerprint())

    def start(self, version: int) -> None:
        """Start writing a checkpoint of the current state; `finish` publishes it.

        Falls back to `write` if trainer.async_checkpoints is off, if the engine cannot save in the background, or if
        the disk was full at the last attempt.
        """
        self.finish()
        if not (self._is_async and not self._disk_was_full and isinstance(self._engine, SupportsAsyncSave)):
            self.write(version)
            return
        if version in self.published:
            return
        self._coverage.before_save()
        path = self._path(version)
        unfinished = durable_folder.temporary_path(path)
        try:
            durable_folder.create_temporary(path)
            if self._state is not None:
                self._state.save(unfinished)
            with self._context.device_lock():
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

    @cached_property
    def _device(self) -> str:
        """Device that computes the model, for a replay; empty if it is simulated."""
        config = self._context.config
        if config.simulate is not None:
            return ""
        from relax_actors.engines.torch.devices import describe_device  # noqa: PLC0415 simulated trainers need no torch

        return describe_device((config.trainer if self._kind == "checkpoint" else critic_section(config)).device)

    def _path(self, version: int) -> Path:
        return self._folder / f"{version}.{self._context.incarnation}"

    def _publish(self, version: int, path: Path, fingerprint: str) -> None:
        context = self._context
        context.progress()
        # A later incarnation may still need the rows that this checkpoint would remove.
        context.raise_if_fenced()
        floor, totals = self._coverage.floor(version)
        cell = Checkpoint(
            version=version,
            path=str(path.relative_to(context.folder.root)),
            fingerprint=fingerprint,
            floor=floor,
            totals=totals,
            incarnation=context.incarnation,
            device=self._device,
        )
        existing = put_own(context, context.table.subjects.numbered(self._kind, version), cell)
        if existing is not None:
            if existing.incarnation > context.incarnation:
                msg = f"{self._kind} {version} was written by a later incarnation; this incarnation exits"
                raise FencedError(msg)
            cell = existing
        self.published[version] = cell.path
        context.journal.event("checkpoint", version=version, floor=cell.floor, path=cell.path)
        self._coverage.after_publish(cell)
        self._remove_old()
        context.progress()

    def _remove_old(self) -> None:
        """Remove old checkpoints; see trainer.keep_checkpoints and run.keep_steps."""
        newest = sorted(self.published)[-self._context.config.trainer.keep_checkpoints :]
        oldest = min(newest[0], self.first_kept(newest[-1]))
        kept = {Path(path).name for version, path in self.published.items() if version >= oldest}
        durable_folder.remove_stale(self._folder, kept, newest[-1], self._context.incarnation)
