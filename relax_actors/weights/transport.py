"""How weights get from the trainer to an actor: by the files in the store, or from the trainer's memory.

The files are the durable copy in any case: what is published lies in the store. A receiver that cannot have weights
from memory reads them there. Both ways end in the same verified copy.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from broker.table import CALL_DEADLINE, Table
from relax_actors.errors import CodecError, ConfigError, StoreError
from relax_actors.messages import Weights
from relax_actors.runtime import Context
from relax_actors.weights.protocol import Content, Offers, Step, WeightsCopy

if TYPE_CHECKING:
    from relax_actors.weights.torch_transport.sender import Address

NOTE = "note.weights_sender"
"""Where a trainer's life leaves its address in the run's bucket: publications outlive those that made them."""
AGAIN_SECONDS = 30.0
"""After a failure a sender is left alone for so long."""


class Sender(Protocol):
    """The trainer's end of a transport."""

    def offer(self, published: Weights) -> None:
        """Weights whose files are written are the engine's now; the caller waits for no receiver."""

    def close(self) -> None:
        """End it."""


class Receiver(Protocol):
    """An actor's end of a transport, for one thread at a time."""

    received: int
    """Versions that came from memory."""

    def bring(self, copy: WeightsCopy, target: Weights) -> bool:
        """Bring a copy to an published version; False if that is not to be had (yet).

        Raises:
            StoreError: what is in the store is not what was published; the copy is then empty.
        """

    def close(self) -> None:
        """End it."""


def sender_of(context: Context, engine: object) -> Sender:
    """The trainer's end, as the run is configured.

    Raises:
        ConfigError: the engine cannot send, or the address cannot be listened on.
    """
    return StoreSender() if context.config.weights.transport == "store" else MemorySender(context, engine)


def receiver_of(context: Context, *, follows: bool) -> Receiver:
    """An actor's end; one that does not follow the newest version asks for what the trainer no longer holds."""
    files = StoreReceiver(context.table)
    return MemoryReceiver(context, files) if follows and context.config.weights.transport == "torch" else files


class StoreSender:
    """The files are all that is needed."""

    def offer(self, published: Weights) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is open."""


class StoreReceiver:
    """Reads the files that lead from what a copy holds, or from the last whole set, to a version."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.received = 0

    def bring(self, copy: WeightsCopy, target: Weights) -> bool:
        """Read files; see `Receiver`."""
        way = self.way(target, copy.version)
        if way:
            copy.take(way)
        return way is not None

    def close(self) -> None:
        """Nothing is open."""

    def way(self, target: Weights, here: int | None) -> list[Step] | None:
        """The files from what is here, or from the last whole set, to a version; None if some are gone."""
        way: list[Step] = []
        cell: Weights | None = target
        while cell is not None and cell.version != here:
            shards = [self._table.store.path(shard.path) for shard in cell.shards]
            if not all(shard.exists() for shard in shards):
                return None
            way.insert(0, Step(cell.version, cell.fingerprint, shards))
            # A delta that was lost may have been written again as a whole set.
            if cell.base_version is None or _is_whole(shards[0]):
                return way
            cell = published_of(self._table, cell.base_version)
        return way if cell is not None else None


class MemorySender:
    """Offers what the engine published last, and leaves its address where receivers look for it."""

    def __init__(self, context: Context, engine: object) -> None:
        from relax_actors.weights.torch_transport.sender import TorchSender  # noqa: PLC0415 only those with torch

        if not isinstance(engine, Offers):
            msg = f'weights.transport = "torch": {type(engine).__name__} keeps no weights to send; set "store"'
            raise ConfigError(msg)
        self._engine, self._journal = engine, context.journal
        self._offered = ""
        settings = context.config.weights
        self._sender = TorchSender(settings.listen, settings.patience)
        note = asdict(self._sender.address)
        context.table.connection.call(context.state.put(NOTE, note), CALL_DEADLINE)

    def offer(self, published: Weights) -> None:
        """Hold the weights, and let go of those before; see `Sender`."""
        if published.fingerprint == self._offered:
            return
        try:
            self._sender.offer(published.fingerprint, self._engine.contents())
        except ValueError as error:
            self._journal.event("weights_not_offered", version=published.version, error=str(error))
        self._offered = published.fingerprint

    def close(self) -> None:
        """Listen no more."""
        self._sender.close()


class MemoryReceiver:
    """Gets the last step of the way from the sender's memory, all of it if nothing is here; else by the files.

    Args:
        context: the actor's.
        files: how to read them.
    """

    def __init__(self, context: Context, files: StoreReceiver) -> None:
        from relax_actors.weights.torch_transport.receiver import TorchReceiver  # noqa: PLC0415 only those with torch

        self._context, self._files = context, files
        self._receiver = TorchReceiver(context.config.weights.patience)
        # The sender that failed last, and when, until another one was of use.
        self._failed: tuple[Address | None, float] | None = None
        self.received = 0

    def bring(self, copy: WeightsCopy, target: Weights) -> bool:
        """Ask the sender, then look into the store; see `Receiver`."""
        way = self._files.way(target, copy.version)
        if not way:
            return way is not None
        address = self._address()
        if self._failed is None or address != self._failed[0] or time.monotonic() > self._failed[1] + AGAIN_SECONDS:
            try:
                content = self._fetch(address, copy, target, way)
                if content is not None:
                    last = replace(way[-1], content=content)
                    copy.take([last] if content.base is None else [*way[:-1], last])
                    self._failed = None
                    self.received += 1
                    return True
            except (StoreError, OSError) as error:
                if self._failed is None:
                    self._context.journal.event("weights_from_file", version=target.version, error=str(error))
                self._failed = address, time.monotonic()
        return self._files.bring(copy, target)

    def close(self) -> None:
        """End the connection."""
        self._receiver.close()

    def _fetch(self, address: Address | None, copy: WeightsCopy, target: Weights, way: list[Step]) -> Content | None:
        if address is None:
            msg = "no sender has said where it is"
            raise StoreError(msg)
        # One that has nothing takes all from memory, not only what was published last.
        before = way[-2].fingerprint if len(way) > 1 else copy.fingerprint
        here = "" if copy.version is None else before
        sizes = [sum(shard.stat().st_size for shard in step.shards) for step in way]
        most = max(*sizes, sum(tensor.nbytes for tensor in copy.tensors.values()))
        return self._receiver.fetch(address, target.fingerprint, here, most)

    def _address(self) -> Address | None:
        """Where the sender of this day is; None if what was left there is no address."""
        from relax_actors.weights.torch_transport.sender import Address  # noqa: PLC0415

        table = self._context.table
        note = table.connection.call(self._context.state.get(NOTE), CALL_DEADLINE)
        note = note if isinstance(note, dict) else {}
        host, port, token = (note.get(name) for name in ("host", "port", "token"))
        if not isinstance(host, str) or not isinstance(token, str) or not isinstance(port, int):
            return None
        return Address(host, port, token) if 0 < port < 1 << 16 else None


def published_of(table: Table, version: int) -> Weights | None:
    """What was published of a version; a cell that is not the trainer's is none: it writes its own in its place."""
    with suppress(CodecError):
        return table.fetch(table.subjects.numbered("weights", version), Weights)
    return None


def _is_whole(shard: Path) -> bool:
    from relax_actors.weights.files import base_of  # noqa: PLC0415 only those whose weights are torch's pay for it

    return base_of(shard) is None
