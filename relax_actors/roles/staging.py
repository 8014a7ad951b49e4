"""Weights on their way into an engine: fetched, verified and prepared beside those in use, while it generates.

Invariant: the engine serves only weights whose bytes had the announced fingerprint. What takes long happens in a thread
of its own; the thread that generates only swaps, between two batches.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from broker.errors import StoreError
from relax_actors.actor import Context
from relax_actors.engines.taking import TakesWeights, WeightsCopy
from relax_actors.errors import ActorError, RowError
from relax_actors.messages import Weights
from relax_actors.roles.transport import announced_of, receiver_of

if TYPE_CHECKING:
    from nats.aio.msg import Msg

WEIGHTS_SECONDS = 30.0
"""How long announced weights may be missing before the actor gives up."""
LOOK_SECONDS = 1.0
"""The table is looked at so often even if no announcement was heard."""
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
        """Begin to prepare what is announced."""
        if self._thread is None:
            return
        table = self._context.table
        subject = table.subjects.numbered("weights", "*")
        table.bridge.call(table.bridge.nc.subscribe(subject, cb=self._on_announcement), 30)
        self._thread.start()

    def use(self, least: int) -> None:
        """Serve the newest weights that are ready; wait for them if those in use are older than `least`.

        Raises:
            RowError: weights as new as that were never announced; rows are admitted after them.
            ActorError: they are announced but did not come, or cannot be prepared.
        """
        end = time.monotonic() + WEIGHTS_SECONDS
        if self.serving is None or self.serving.version < least:
            self._require_announced(least)
        with self._changed:
            while not self._serves(least):
                if self._error is not None:
                    msg = f"weights cannot be prepared: {self._error}"
                    raise ActorError(msg) from self._error
                if time.monotonic() > end or self._context.stopping():
                    msg = f"a row needs weights {least} or newer; {WEIGHTS_SECONDS:g} s gave none whose files are whole"
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

    def use_exactly(self, version: int) -> bool:
        """Serve just that version; False if it or its files are gone."""
        if self.serving is not None and self.serving.version == version:
            return True
        announced = announced_of(self._context.table, version)
        if announced is None:
            return False
        with self._preparing:
            with self._changed:
                if self._serves(version) and self.serving is not None and self.serving.version == version:
                    return True
            here = self._copy.version
            if not self._prepare(announced, self._copy if here is None or here <= version else self._empty()):
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
        end = time.monotonic() + WEIGHTS_SECONDS
        while not self.use_exactly(version):
            if time.monotonic() > end or self._context.stopping():
                msg = f"weights {version} are not whole in the store for {WEIGHTS_SECONDS:g} s"
                raise ActorError(msg)
            if (announced := announced_of(self._context.table, version)) is not None:
                self._discard(announced)
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

    def _require_announced(self, least: int) -> None:
        newest = self._context.table.fetch_last("weights", Weights)
        if newest is None or newest.version < least:
            at = "none" if newest is None else newest.version
            msg = f"the row demands weights {least} or newer, the newest announced is {at}"
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

    async def _on_announcement(self, message: Msg) -> None:
        version = message.subject.rpartition(".")[2]
        with self._changed:
            if version.isdigit() and int(version) > self._heard:
                self._heard, self._heard_until = int(version), time.monotonic() + LOOK_SECONDS
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
            try:
                found = self._look_for_newer()
            except Exception as error:  # noqa: BLE001 told where somebody waits for it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                found = True
            pause = LOOK_SECONDS if found else RETRY_SECONDS

    def _look_for_newer(self) -> bool:
        """Prepare the newest weights; False if they are not there yet, though they have been announced."""
        table = self._context.table
        newest = table.fetch_last("weights", Weights)
        with self._changed:
            # An announcement may be heard a moment before the table has it; one that was refused it never has.
            behind = self._heard > (-1 if newest is None else newest.version) and time.monotonic() < self._heard_until
            there = [self.serving, self._ready]
        if newest is None or newest.version in {cell.version for cell in there if cell is not None}:
            return not behind
        with self._preparing:
            if not self._prepare(newest, self._copy):
                if table.fetch_last("weights", Weights) == newest:
                    self._discard(newest)
                return False
        with self._changed:
            # Whoever generates may have swapped to it already, in place of one that was ready before.
            if self.serving is None or self.serving.version != newest.version:
                self._ready = newest
            self._error = None
            self._changed.notify_all()
        return not behind

    def _prepare(self, target: Weights, copy: WeightsCopy) -> bool:
        """Have the engine stage a version; False if its files are not there, or are not what was announced."""
        try:
            if not self._receiver.bring(copy, target):
                return False
            with self._changed:
                # Two are alive at most: what the engine has staged, and this one.
                self._known.pop(target.version, None)
                self._known = dict([*self._known.items(), (target.version, target)][-2:])
            self._engine.stage(target.version, copy.tensors)
        except StoreError as error:
            self._context.journal.event("weights_corrupt", version=target.version, error=str(error))
            return False
        finally:
            if not self._keeps:
                self._copy = self._empty()
        return True

    def _discard(self, announced: Weights) -> None:
        """Remove files that lead nowhere: the trainer sees that they are gone, and writes a whole set."""
        for shard in announced.shards:
            self._context.table.store.path(shard.path).unlink(missing_ok=True)
