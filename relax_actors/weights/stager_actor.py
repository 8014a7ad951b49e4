"""Actor that fetches, verifies and stages weight versions while the engine computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from relax_actors.errors import StoreError
from relax_actors.messages import Weights
from relax_actors.runtime import Context
from relax_actors.runtime.actor import Actor
from relax_actors.weights.engine_weights import EngineWeights
from relax_actors.weights.protocols import WeightCopy
from relax_actors.weights.transports.base import Receiver

POLL_SECONDS = 10.0
"""Interval at which the table is polled even if no publication and no reconnection was seen."""
ERROR_RETRY_SECONDS = 1.0
RETRY_SECONDS = 0.02
"""Interval at which a published version is polled for that is not complete yet."""


class Newest(NamedTuple):
    """The newest published version (-1: none), and whether nothing newer is to be staged."""

    version: int
    is_staged: bool


@dataclass(frozen=True, slots=True)
class PrepareNewest:
    """Stage the newest published weights now; the answer is `Newest`."""


@dataclass(frozen=True, slots=True)
class UseExactly:
    """Stage exactly this version and swap to it; the answer is whether its files are there.

    The thread that generates must wait for the answer.
    """

    target: Weights


@dataclass(frozen=True, slots=True)
class Poll:
    """Look for newer weights: after an announcement, or by the timer."""

    announced: int = -1
    timer: int | None = None


Message: TypeAlias = PrepareNewest | UseExactly | Poll


class StagerActor(Actor):
    """Stages weights for one engine.

    Invariant: only weights whose bytes have the published fingerprint are staged. `empty_copy` makes a host copy for
    the engine; `receiver` brings it to a version. Unless it `follows` new versions, only those of `UseExactly` are
    loaded.
    """

    name = "stager"

    def __init__(
        self,
        context: Context,
        weights: EngineWeights,
        empty_copy: Callable[[], WeightCopy],
        receiver: Receiver,
        *,
        follows: bool,
    ) -> None:
        super().__init__(context)
        self._weights, self._empty_copy, self._receiver, self._follows = weights, empty_copy, receiver, follows
        self._copy = empty_copy()
        self._keeps_copy = follows and context.config.publishes_deltas
        self._announced, self._announced_until = -1, 0.0
        self._timer = 0

    def on_receive(self, message: Message) -> Any:
        """Stage what a message asks for."""
        match message:
            case PrepareNewest():
                return self._prepare_newest()
            case UseExactly(target):
                return self._use_exactly(target)
            case Poll(announced, timer):
                if announced >= max(self._announced, 0):
                    self._announced, self._announced_until = announced, time.monotonic() + ERROR_RETRY_SECONDS
                return self._poll() if timer in (None, self._timer) else None

    def on_stop(self) -> None:
        """Close the receiver, and release the copy."""
        self._receiver.close()
        self._copy = self._empty_copy()

    def _poll(self) -> None:
        """Stage the newest weights and look again later; errors go to those who wait."""
        try:
            pause = POLL_SECONDS if self._prepare_newest().is_staged else RETRY_SECONDS
        except Exception as error:  # noqa: BLE001 polled again
            import structlog  # noqa: PLC0415 `relax check` loads every role, and logs nothing

            structlog.get_logger().warning("weights_not_prepared", error=f"{type(error).__name__}: {error}")
            pause = ERROR_RETRY_SECONDS
        self._timer += 1
        self.tell_later(pause, Poll(timer=self._timer))

    def _prepare_newest(self) -> Newest:
        newest = self.context.table.fetch_last("weights", Weights)
        version = -1 if newest is None else newest.version
        # A notification can arrive just before the table has the cell; a refused write also notifies, and its cell
        # never comes.
        is_behind = self._announced > version and time.monotonic() < self._announced_until
        if newest is not None and not self._weights.is_present(version):
            if not self._prepare(newest, self._copy, discard_corrupt=True):
                return Newest(version, is_staged=False)
            self._weights.offer(newest)
        return Newest(version, is_staged=not is_behind)

    def _use_exactly(self, target: Weights) -> bool:
        weights = self._weights
        weights.refresh()
        if weights.serving is not None and weights.serving.version == target.version:
            return True
        current = self._copy.version
        copy = self._copy if current is None or current <= target.version else self._empty_copy()
        if not self._prepare(target, copy, discard_corrupt=not self._follows):
            return False
        weights.offer(target)
        weights.refresh()
        if self._timer:
            self.actor_ref.tell(Poll())
        return True

    def _prepare(self, target: Weights, copy: WeightCopy, *, discard_corrupt: bool) -> bool:
        """Stage a version; return False if its files are missing or not what was published.

        With `discard_corrupt`, corrupt files are removed, so that the trainer writes a full set in their place.
        """
        files = self._files_of(target)
        try:
            if self._receiver.update(copy, target):
                self._weights.stage(target, copy)
                return True
        except StoreError as error:
            self.context.journal.event("weights_corrupt", version=target.version, error=str(error))
            # A file that cannot be opened is not necessarily corrupt.
            discard_corrupt = discard_corrupt and not isinstance(error.__cause__, OSError)
        finally:
            if not self._keeps_copy:
                self._copy = self._empty_copy()
        if discard_corrupt:
            _discard(files)
        return False

    def _files_of(self, target: Weights) -> dict[Path, tuple[int, int]]:
        """Return the existing files of a version, each with its inode and modification time."""
        files = {}
        for shard in target.shards:
            path = self.context.table.store.path(shard.path)
            with suppress(OSError):
                files[path] = _file_identity(path)
        return files


def _discard(files: dict[Path, tuple[int, int]]) -> None:
    """Remove files, unless they were rewritten since."""
    for path, identity in files.items():
        with suppress(OSError):
            if _file_identity(path) == identity:
                path.unlink()


def _file_identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns
