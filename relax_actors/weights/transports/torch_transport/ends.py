"""The two ends of the transport `"torch"`, for the newest version alone; older versions are read from files."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from broker.table import CALL_DEADLINE
from relax_actors.errors import ConfigError, StoreError
from relax_actors.messages import Weights
from relax_actors.runtime import Context
from relax_actors.weights.protocols import PayloadProducer, WeightCopy, WeightPayload, WeightProducer, WeightUpdate
from relax_actors.weights.transports.base import ADDRESS_KEY
from relax_actors.weights.transports.store import StoreReceiver
from relax_actors.weights.transports.torch_transport.receiver import TorchReceiver
from relax_actors.weights.transports.torch_transport.sender import Address, TorchSender

SENDER_RETRY_SECONDS = 30.0
"""A receiver does not contact a failed sender again for this time."""


class MemorySender:
    """Offers the last published weights and writes its address where receivers look for it.

    Args:
        context: of the trainer.
        engine: whose weights are sent.

    Raises:
        ConfigError: the engine cannot send, or `weights.listen` cannot be listened on.
    """

    def __init__(self, context: Context, engine: WeightProducer) -> None:
        if not isinstance(engine, PayloadProducer):
            msg = f'weights.transport = "torch": {type(engine).__name__} keeps no weights to send; set "store"'
            raise ConfigError(msg)
        self._engine, self._journal = engine, context.journal
        self._offered = ""
        settings = context.config.weights
        self._sender = TorchSender(settings.listen, settings.patience)
        address = asdict(self._sender.address)
        context.table.connection.call(context.state.put(ADDRESS_KEY, address), CALL_DEADLINE)

    def offer(self, published: Weights) -> None:
        """Hold the engine's weights in place of the previous ones; see `Sender`."""
        if published.fingerprint == self._offered:
            return
        try:
            self._sender.offer(published.fingerprint, self._engine.payloads())
        except ValueError as error:
            self._journal.event("weights_not_offered", version=published.version, error=str(error))
        self._offered = published.fingerprint

    def close(self) -> None:
        """Stop listening."""
        self._sender.close()


class MemoryReceiver:
    """Receives the newest version from the sender's memory; falls back to the files.

    Args:
        context: of the actor.
        files: reads the older versions, and the newest where the sender fails.
    """

    def __init__(self, context: Context, files: StoreReceiver) -> None:
        self._context, self._files = context, files
        self._receiver = TorchReceiver(context.config.weights.patience)
        # Address of the last failed sender and when it failed; None once a sender has answered.
        self._failed: tuple[Address | None, float] | None = None
        self.received = 0

    def update(self, copy: WeightCopy, target: Weights) -> bool:
        """Advance a copy from memory, else from files; see `Receiver`."""
        updates = self.updates_to(target, copy.version)
        if not updates:
            return updates is not None
        address = self._sender_address()
        if self._may_ask(address):
            try:
                payload = self._fetch(address, copy, target, updates)
                if payload is not None:
                    last = replace(updates[-1], payload=payload)
                    copy.apply([last] if payload.base is None else [*updates[:-1], last])
                    self._failed = None
                    self.received += 1
                    return True
            except (StoreError, OSError) as error:
                if self._failed is None:
                    self._context.journal.event("weights_from_file", version=target.version, error=str(error))
                self._failed = address, time.monotonic()
        return self._files.update(copy, target)

    def updates_to(self, target: Weights, current: int | None) -> list[WeightUpdate] | None:
        """Return the updates as files; see `Receiver`."""
        return self._files.updates_to(target, current)

    def close(self) -> None:
        """Close the connection."""
        self._receiver.close()

    def _may_ask(self, address: Address | None) -> bool:
        if self._failed is None:
            return True
        failed_address, failed_at = self._failed
        return address != failed_address or time.monotonic() > failed_at + SENDER_RETRY_SECONDS

    def _fetch(
        self, address: Address | None, copy: WeightCopy, target: Weights, updates: list[WeightUpdate]
    ) -> WeightPayload | None:
        if address is None:
            msg = "no sender has published its address"
            raise StoreError(msg)
        # An empty copy asks for the full set, which needs no file; others ask for the delta to the version before.
        previous = updates[-2].fingerprint if len(updates) > 1 else copy.fingerprint
        base = "" if copy.version is None else previous
        sizes = [sum(shard.stat().st_size for shard in update.shards) for update in updates]
        max_bytes = max(*sizes, sum(tensor.nbytes for tensor in copy.tensors.values()))
        return self._receiver.fetch(address, target.fingerprint, base, max_bytes)

    def _sender_address(self) -> Address | None:
        """Return the address of the current sender; None if there is none or it is malformed."""
        table = self._context.table
        note = table.connection.call(self._context.state.get(ADDRESS_KEY), CALL_DEADLINE)
        note = note if isinstance(note, dict) else {}
        host, port, token = (note.get(name) for name in ("host", "port", "token"))
        if not isinstance(host, str) or not isinstance(token, str) or not isinstance(port, int):
            return None
        return Address(host, port, token) if 0 < port < 1 << 16 else None
