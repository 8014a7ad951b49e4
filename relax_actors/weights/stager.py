"""Weights of the generating thread: swaps to staged versions, or waits for one.

Invariant: the engine serves only weights whose bytes have the published fingerprint. The slow work is the stager
actor's (`stager_actor.py`); the thread that generates only swaps.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pykka

from relax_actors.errors import ActorError, BrokerError, RowError
from relax_actors.runtime import Context
from relax_actors.weights.engine_weights import EngineWeights
from relax_actors.weights.protocols import SharesCopies, WeightConsumer
from relax_actors.weights.stager_actor import (
    RETRY_SECONDS,
    Message,
    Newest,
    Poll,
    PrepareNewest,
    StagerActor,
    UseExactly,
)
from relax_actors.weights.transports import make_transport
from relax_actors.weights.transports.store import fetch_published

if TYPE_CHECKING:
    from nats.aio.msg import Msg

CLOSE_SECONDS = 2.0


class Stager(EngineWeights):
    """The newest weights of one engine. Public methods are for the thread that generates.

    Unless it `follows` new versions, only those passed to `use_version` and `try_use_version` are loaded.
    """

    def __init__(self, context: Context, engine: WeightConsumer, *, follows: bool = True) -> None:
        super().__init__(engine)
        self._context, self._follows = context, follows
        # How long published weights may be missing: the trainer rewrites lost files after its current step.
        self._patience = context.config.trainer.deadline
        if follows and context.config.publishes_deltas and isinstance(engine, SharesCopies):
            from relax_actors.weights.node_sets import node_sets  # noqa: PLC0415 imports torch; see `StoreReceiver`

            # A sandbox shows the folder of its node read-only, and has processes of its own: its copies are, too.
            with suppress(OSError):
                engine.share_copies(node_sets(context))
        self._receiver = make_transport(context).make_receiver(follows=follows)
        self._actor = StagerActor.start(context, self, engine.empty_copy, self._receiver, follows=follows)

    def start(self) -> None:
        """Begin to stage published versions in the background."""
        if not self._follows:
            return
        table = self._context.table
        subject = table.subjects.numbered("weights", "*")
        table.connection.call(table.connection.nc.subscribe(subject, cb=self._on_publication), 30)
        # Publications during a broken connection are not delivered.
        table.connection.on_reconnect.append(self._on_reconnect)
        self._tell(Poll())

    def use_newest(self, min_version: int) -> None:
        """Swap to the newest staged weights; wait if those in use are older than `min_version`.

        Raises:
            RowError: no version from `min_version` on was published; rows are admitted after their weights.
            ActorError: the weights are published but did not arrive, or cannot be prepared.
        """
        end = time.monotonic() + self._patience
        reason = (
            f"a row needs weights {min_version} or newer; none had complete files within {self._patience:g} s. "
            "Look for weights_corrupt and for free space of the store"
        )
        self.refresh()
        while self.serving is None or self.serving.version < min_version:
            newest = self.prepare_newest(end, reason)
            if newest.version < min_version:
                published = "none" if newest.version < 0 else newest.version
                msg = f"the row demands weights {min_version} or newer, the newest published is {published}"
                raise RowError(msg)
            if not self.refresh():
                self._pause(end, reason)

    def prepare_newest(self, end: float | None = None, reason: str = "the newest weights were not staged") -> Newest:
        """Have the newest published weights staged; return which they are.

        Raises:
            ActorError: they cannot be prepared; or they are not at time `end`, for which `reason` is given.
        """
        end = time.monotonic() + self._patience if end is None else end
        try:
            newest: Newest = self._ask(PrepareNewest(), end, reason)
        except (ActorError, BrokerError):
            raise
        except Exception as error:
            msg = f"weights cannot be prepared: {error}"
            raise ActorError(msg) from error
        return newest

    def try_use_version(self, version: int) -> bool:
        """Swap to exactly this version; return False if it is not published or its files are gone.

        Raises:
            ActorError: its files are there, but were not prepared in time.
        """
        if self.serving is not None and self.serving.version == version:
            return True
        target = fetch_published(self._context.table, version)
        if target is None:
            return False
        reason = f"weights {version} were not prepared within {self._patience:g} s; raise trainer.deadline"
        return bool(self._ask(UseExactly(target), time.monotonic() + self._patience, reason))

    def use_version(self, version: int) -> None:
        """Swap to exactly this version; wait until its files are complete.

        Corrupt files are removed, and the trainer rewrites them.

        Raises:
            ActorError: the version did not arrive.
        """
        end = time.monotonic() + self._patience
        while not self.try_use_version(version):
            self._pause(end, f"weights {version} have no complete files in the store after {self._patience:g} s")

    def close(self) -> None:
        """Stop to stage weights."""
        with suppress(pykka.Timeout):
            self._actor.stop(timeout=CLOSE_SECONDS)

    def _ask(self, message: Message, end: float, reason: str) -> Any:
        """Return the actor's answer; raise an error with the reason at time `end`."""
        answer = self._actor.ask(message, block=False)
        while True:
            with suppress(pykka.Timeout):
                return answer.get(timeout=RETRY_SECONDS)
            if time.monotonic() > end:
                raise ActorError(reason)
            self._context.progress()

    def _pause(self, end: float, reason: str) -> None:
        """Wait a moment; raise an error with the reason after `end`, or when stopping."""
        if time.monotonic() > end or self._context.stopping():
            raise ActorError(reason)
        time.sleep(RETRY_SECONDS)
        self._context.progress()

    def _tell(self, message: Message) -> None:
        with suppress(pykka.ActorDeadError):
            self._actor.tell(message)

    async def _on_reconnect(self) -> None:
        self._tell(Poll())

    async def _on_publication(self, message: Msg) -> None:
        version = message.subject.rpartition(".")[2]
        self._tell(Poll(announced=int(version) if version.isdigit() else -1))
