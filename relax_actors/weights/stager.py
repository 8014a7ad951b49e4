"""Weights on their way into an engine: fetched, verified and prepared beside those in use, while it generates.

Invariant: the engine serves only weights whose bytes had the published fingerprint. What takes long happens in a thread
of its own; the thread that generates only swaps, between two batches.
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
from relax_actors.weights.protocol import TakesWeights, WeightsCopy
from relax_actors.weights.transport import published_of, receiver_of

if TYPE_CHECKING:
    from nats.aio.msg import Msg

LOOK_SECONDS = 10.0
"""The table is looked at so often even if no publication was heard, and no reconnection."""
AGAIN_SECONDS = 1.0
RETRY_SECONDS = 0.02


class Stager:
    """Prepares the newest weights for one engine.

    Methods are for the thread that generates, but for those that begin with an underscore.

    Args:
        context: the actor's.
        engine: which nobody else gives weights to.
        follows: whether newer versions are to come; else only those asked for by `use_exactly` and `await_exactly`.
    """

    def __init__(self, context: Context, engine: TakesWeights, *, follows: bool = True) -> None:
        self._context, self._engine, self._empty = context, engine, engine.empty_copy
        self._copy = self._empty()
        # How long published weights may be missing: the trainer mends that, when it is through with its step.
        self._patience = context.config.trainer.deadline
        self._receiver = receiver_of(context, follows=follows)
        self._keeps = follows and context.config.publishes_deltas
        # Held while the copy changes and the engine stages.
        self._preparing = threading.Lock()
        # Guards all below.
        self._changed = threading.Condition()
        self._known: dict[int, Weights] = {}
        self._ready: Weights | None = None
        self._heard, self._heard_until = -1, 0.0
        self._look = True
        self._error: Exception | None = None
        self._closing = False
        self.serving: Weights | None = None
        self.swap_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="stager", daemon=True) if follows else None

    @property
    def from_memory(self) -> int:
        """Versions that came from the trainer's memory."""
        return self._receiver.received

    def start(self) -> None:
        """Begin to prepare what is published."""
        if self._thread is None:
            return
        table = self._context.table
        subject = table.subjects.numbered("weights", "*")
        table.connection.call(table.connection.nc.subscribe(subject, cb=self._on_publication), 30)
        # What was published without a connection was not heard.
        table.connection.on_reconnect.append(self._on_reconnect)
        self._thread.start()

    def use(self, least: int) -> None:
        """Serve the newest weights that are ready; wait for them if those in use are older than `least`.

        Raises:
            RowError: weights as new as that were never published; rows are admitted after them.
            ActorError: they are published but did not come, or cannot be prepared.
        """
        end = time.monotonic() + self._patience
        if self.serving is None or self.serving.version < least:
            self._require_published(least)
        with self._changed:
            while not self._serves(least):
                if self._error is not None:
                    msg = f"weights cannot be prepared: {self._error}"
                    raise ActorError(msg) from self._error
                if time.monotonic() > end or self._context.stopping():
                    msg = f"a row needs weights {least} or newer; {self._patience:g} s gave none whose files are whole"
                    raise ActorError(msg)
                self._look = True
                self._changed.notify_all()
                self._changed.wait(RETRY_SECONDS)
                self._context.progress()

    def refresh(self) -> bool:
        """Serve newer weights if they are ready; tells whether it does. Between two tokens of a generation."""
        if self._ready is None:
            return False
        with self._changed:
            before = self.serving
            return self._serves(0) and self.serving != before

    @property
    def has_newer(self) -> bool:
        """Whether weights are ready that are newer than those in use."""
        return self._ready is not None

    def use_exactly(self, version: int) -> bool:
        """Serve just that version; False if it or its files are gone."""
        if self.serving is not None and self.serving.version == version:
            return True
        published = published_of(self._context.table, version)
        if published is None:
            return False
        with self._preparing:
            with self._changed:
                if self._serves(version) and self.serving is not None and self.serving.version == version:
                    return True
            here = self._copy.version
            copy = self._copy if here is None or here <= version else self._empty()
            if not self._prepare(published, copy, mends=self._thread is None):
                return False
            with self._changed:
                self._swap()
                self._look = True
                self._changed.notify_all()
        return True

    def await_exactly(self, version: int) -> None:
        """Serve just that version, which the trainer keeps; what is there and no good is removed, to be written again.

        Raises:
            ActorError: it did not come.
        """
        end = time.monotonic() + self._patience
        while not self.use_exactly(version):
            if time.monotonic() > end or self._context.stopping():
                msg = f"weights {version} are not whole in the store for {self._patience:g} s"
                raise ActorError(msg)
            time.sleep(RETRY_SECONDS)
            self._context.progress()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(2)
        self._receiver.close()

    def _require_published(self, least: int) -> None:
        newest = self._context.table.fetch_last("weights", Weights)
        if newest is None or newest.version < least:
            at = "none" if newest is None else newest.version
            msg = f"the row demands weights {least} or newer, the newest published is {at}"
            raise RowError(msg)

    def _serves(self, least: int) -> bool:
        if self._ready is not None:
            self._swap()
        return self.serving is not None and self.serving.version >= least

    def _swap(self) -> None:
        began = time.perf_counter()
        version = self._engine.swap()
        self.swap_seconds = time.perf_counter() - began
        self.serving, self._ready = self._known[version], None

    async def _on_reconnect(self) -> None:
        with self._changed:
            self._look = True
            self._changed.notify_all()

    async def _on_publication(self, message: Msg) -> None:
        version = message.subject.rpartition(".")[2]
        with self._changed:
            if version.isdigit() and int(version) >= self._heard:
                self._heard, self._heard_until = int(version), time.monotonic() + AGAIN_SECONDS
            self._look = True
            self._changed.notify_all()

    def _run(self) -> None:
        pause = LOOK_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._look or self._closing, pause)
                if self._closing:
                    return
                self._look = False
            failed: Exception | None = None
            try:
                found = self._look_for_newer()
            except Exception as error:  # noqa: BLE001 told where somebody waits for it
                failed, found = error, False
            with self._changed:
                self._error = failed
                self._changed.notify_all()
            pause = LOOK_SECONDS if found else RETRY_SECONDS if failed is None else AGAIN_SECONDS

    def _look_for_newer(self) -> bool:
        """Prepare the newest weights; False if they are not there yet, though they have been published."""
        table = self._context.table
        newest = table.fetch_last("weights", Weights)
        with self._changed:
            # An publication may be heard a moment before the table has it; one that was refused it never has.
            behind = self._heard > (-1 if newest is None else newest.version) and time.monotonic() < self._heard_until
            there = [self.serving, self._ready]
        if newest is None or newest.version in {cell.version for cell in there if cell is not None}:
            return not behind
        with self._preparing:
            if not self._prepare(newest, self._copy, mends=True):
                return False
            # Before anybody else may stage: what is ready is what the engine has staged.
            with self._changed:
                if self.serving is None or self.serving.version != newest.version:
                    self._ready = newest
                self._changed.notify_all()
        return not behind

    def _prepare(self, target: Weights, copy: WeightsCopy, *, mends: bool) -> bool:
        """Have the engine stage a version; False if its files are not there, or are not what was published.

        Args:
            target: what was published of it.
            copy: to go on from.
            mends: whether to remove its files if they lead nowhere: the trainer then writes a whole set in their place.
        """
        files = self._files(target)
        try:
            if self._receiver.bring(copy, target):
                with self._changed:
                    # Two are alive at most: what the engine has staged, and this one.
                    self._known.pop(target.version, None)
                    self._known = dict([*self._known.items(), (target.version, target)][-2:])
                self._engine.stage(target.version, copy.tensors)
                return True
        except StoreError as error:
            self._context.journal.event("weights_corrupt", version=target.version, error=str(error))
            # A file that cannot be opened may be whole.
            mends = mends and not isinstance(error.__cause__, OSError)
        finally:
            if not self._keeps:
                self._copy = self._empty()
        if mends:
            self._remove(files)
        return False

    def _files(self, target: Weights) -> dict[Path, tuple[int, int]]:
        """The files of a version that are there, each with what tells it from one written later."""
        found = {}
        for shard in target.shards:
            path = self._context.table.store.path(shard.path)
            with suppress(OSError):
                found[path] = _identity(path)
        return found

    def _remove(self, files: dict[Path, tuple[int, int]]) -> None:
        """Remove files, but for those that were written anew meanwhile."""
        for path, identity in files.items():
            with suppress(OSError):
                if _identity(path) == identity:
                    path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns
