"""Fetches, verifies and stages weight versions while the engine computes.

Invariant: the engine serves only weights whose bytes have the published fingerprint. The slow work runs in a thread of
its own; the thread that generates only swaps, between two batches.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from relax_actors.errors import ActorError, RowError, StoreError
from relax_actors.messages import Weights
from relax_actors.runtime import Context
from relax_actors.weights.protocols import WeightConsumer, WeightCopy
from relax_actors.weights.transports import make_transport
from relax_actors.weights.transports.store import fetch_published

if TYPE_CHECKING:
    from nats.aio.msg import Msg

POLL_SECONDS = 10.0
"""Interval at which the table is polled even if no publication and no reconnection was seen."""
ERROR_RETRY_SECONDS = 1.0
RETRY_SECONDS = 0.02
"""Interval at which a published version is polled for that is not complete yet."""


class Stager:
    """Stages the newest weights for one engine.

    Public methods are for the thread that generates, except `prepare_newest`.

    Args:
        context: of the actor.
        engine: which gets its weights from nothing else.
        follows: whether to follow new versions. If not, only the versions passed to `use_version` and `try_use_version`
            are loaded.
    """

    def __init__(self, context: Context, engine: WeightConsumer, *, follows: bool = True) -> None:
        self._context, self._engine, self._empty_copy = context, engine, engine.empty_copy
        self._copy = self._empty_copy()
        # How long published weights may be missing: the trainer rewrites lost files after its current step.
        self._patience = context.config.trainer.deadline
        self._receiver = make_transport(context).make_receiver(follows=follows)
        self._keeps_copy = follows and context.config.publishes_deltas
        # Held while the copy changes and the engine stages.
        self._preparing = threading.Lock()
        # Guards all fields below.
        self._changed = threading.Condition()
        self._known: dict[int, Weights] = {}
        self._ready: Weights | None = None
        self._notified, self._notified_until = -1, 0.0
        self._poll_now = True
        self._error: Exception | None = None
        self._closing = False
        self.serving: Weights | None = None
        """Version in use."""
        self.swap_seconds = 0.0
        """Duration of the last swap."""
        self._thread = threading.Thread(target=self._run, name="stager", daemon=True) if follows else None

    @property
    def received_from_memory(self) -> int:
        """Number of versions received from the trainer's memory."""
        return self._receiver.received

    def start(self) -> None:
        """Start to prepare published versions, in a thread of its own."""
        if self._thread is None:
            return
        table = self._context.table
        subject = table.subjects.numbered("weights", "*")
        table.connection.call(table.connection.nc.subscribe(subject, cb=self._on_publication), 30)
        # Publications during a broken connection are not delivered.
        table.connection.on_reconnect.append(self._on_reconnect)
        self._thread.start()

    def use_newest(self, min_version: int) -> None:
        """Swap to the newest prepared weights; wait if those in use are older than `min_version`.

        Raises:
            RowError: no version from `min_version` on was published; rows are admitted after their weights.
            ActorError: the weights are published but did not arrive, or cannot be prepared.
        """
        end = time.monotonic() + self._patience
        if self.serving is None or self.serving.version < min_version:
            self._require_published(min_version)
        with self._changed:
            while not self._swap_to(min_version):
                if self._error is not None:
                    msg = f"weights cannot be prepared: {self._error}"
                    raise ActorError(msg) from self._error
                if time.monotonic() > end or self._context.stopping():
                    msg = (
                        f"a row needs weights {min_version} or newer; none had complete files within "
                        f"{self._patience:g} s. Look for weights_corrupt and for free space of the store"
                    )
                    raise ActorError(msg)
                self._poll_now = True
                self._changed.notify_all()
                self._changed.wait(RETRY_SECONDS)
                self._context.progress()

    def refresh(self) -> bool:
        """Swap to newer weights if they are prepared; return whether it did.

        Runs between two tokens.
        """
        if self._ready is None:
            return False
        with self._changed:
            before = self.serving
            return self._swap_to(0) and self.serving != before

    @property
    def has_newer(self) -> bool:
        """Whether newer weights than those in use are prepared."""
        return self._ready is not None

    def try_use_version(self, version: int) -> bool:
        """Swap to exactly this version; return False if it is not published or its files are gone."""
        if self.serving is not None and self.serving.version == version:
            return True
        published = fetch_published(self._context.table, version)
        if published is None:
            return False
        with self._preparing:
            with self._changed:
                if self._swap_to(version) and self.serving is not None and self.serving.version == version:
                    return True
            current = self._copy.version
            copy = self._copy if current is None or current <= version else self._empty_copy()
            if not self._prepare(published, copy, discard_corrupt=self._thread is None):
                return False
            with self._changed:
                self._swap()
                self._poll_now = True
                self._changed.notify_all()
        return True

    def use_version(self, version: int) -> None:
        """Swap to exactly this version; wait until its files are complete.

        Corrupt files are removed, and the trainer rewrites them.

        Raises:
            ActorError: the version did not arrive.
        """
        end = time.monotonic() + self._patience
        while not self.try_use_version(version):
            if time.monotonic() > end or self._context.stopping():
                msg = f"weights {version} have no complete files in the store after {self._patience:g} s"
                raise ActorError(msg)
            time.sleep(RETRY_SECONDS)
            self._context.progress()

    def close(self) -> None:
        """Stop the thread and close the receiver."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(2)
        self._receiver.close()

    def _require_published(self, min_version: int) -> None:
        newest = self._context.table.fetch_last("weights", Weights)
        if newest is None or newest.version < min_version:
            found = "none" if newest is None else newest.version
            msg = f"the row demands weights {min_version} or newer, the newest published is {found}"
            raise RowError(msg)

    def _swap_to(self, min_version: int) -> bool:
        """Swap if weights are prepared; return whether those in use are at least `min_version`."""
        if self._ready is not None:
            self._swap()
        return self.serving is not None and self.serving.version >= min_version

    def _swap(self) -> None:
        began = time.perf_counter()
        version = self._engine.swap()
        self.swap_seconds = time.perf_counter() - began
        self.serving, self._ready = self._known[version], None

    async def _on_reconnect(self) -> None:
        with self._changed:
            self._poll_now = True
            self._changed.notify_all()

    async def _on_publication(self, message: Msg) -> None:
        version = message.subject.rpartition(".")[2]
        with self._changed:
            if version.isdigit() and int(version) >= self._notified:
                self._notified, self._notified_until = int(version), time.monotonic() + ERROR_RETRY_SECONDS
            self._poll_now = True
            self._changed.notify_all()

    def _run(self) -> None:
        pause = POLL_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._poll_now or self._closing, pause)
                if self._closing:
                    return
                self._poll_now = False
            failed: Exception | None = None
            try:
                complete = self.prepare_newest()
            except Exception as error:  # noqa: BLE001 raised in the thread that waits for the weights
                failed, complete = error, False
            with self._changed:
                self._error = failed
                self._changed.notify_all()
            pause = POLL_SECONDS if complete else RETRY_SECONDS if failed is None else ERROR_RETRY_SECONDS

    def prepare_newest(self) -> bool:
        """Stage the newest published weights; return False if they are not available yet.

        The stager's thread calls this; without that thread any one other may.
        """
        table = self._context.table
        newest = table.fetch_last("weights", Weights)
        with self._changed:
            # A notification can arrive just before the table has the cell; a refused write also notifies, and its
            # cell never comes.
            newest_version = -1 if newest is None else newest.version
            is_behind = self._notified > newest_version and time.monotonic() < self._notified_until
            present = [self.serving, self._ready]
        if newest is None or newest.version in {cell.version for cell in present if cell is not None}:
            return not is_behind
        with self._preparing:
            if not self._prepare(newest, self._copy, discard_corrupt=True):
                return False
            # Still under the lock: `_ready` must name what the engine has staged.
            with self._changed:
                if self.serving is None or self.serving.version != newest.version:
                    self._ready = newest
                self._changed.notify_all()
        return not is_behind

    def _prepare(self, target: Weights, copy: WeightCopy, *, discard_corrupt: bool) -> bool:
        """Stage a version; return False if its files are missing or not what was published.

        Args:
            target: cell of the version.
            copy: host copy to advance.
            discard_corrupt: whether to remove corrupt files, so that the trainer writes a full set in their place.
        """
        files = self._files_of(target)
        try:
            if self._receiver.update(copy, target):
                with self._changed:
                    # The engine holds at most two: the staged version before, and this one.
                    self._known.pop(target.version, None)
                    self._known = dict([*self._known.items(), (target.version, target)][-2:])
                self._engine.stage(target.version, copy.tensors)
                return True
        except StoreError as error:
            self._context.journal.event("weights_corrupt", version=target.version, error=str(error))
            # A file that cannot be opened is not necessarily corrupt.
            discard_corrupt = discard_corrupt and not isinstance(error.__cause__, OSError)
        finally:
            if not self._keeps_copy:
                self._copy = self._empty_copy()
        if discard_corrupt:
            self._discard(files)
        return False

    def _files_of(self, target: Weights) -> dict[Path, tuple[int, int]]:
        """Return the existing files of a version, each with its inode and modification time."""
        found = {}
        for shard in target.shards:
            path = self._context.table.store.path(shard.path)
            with suppress(OSError):
                found[path] = _file_identity(path)
        return found

    def _discard(self, files: dict[Path, tuple[int, int]]) -> None:
        """Remove files, unless they were rewritten since."""
        for path, identity in files.items():
            with suppress(OSError):
                if _file_identity(path) == identity:
                    path.unlink()


def _file_identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns
