"""Receiving end: one connection, kept until it fails; no call exceeds its deadline.

A stopped process neither answers nor closes its sockets, and torch can wait for it in calls that have no deadline. Gloo
reports a process that dies in the middle of a message only at its own timeout. Each exchange therefore runs in a thread
that is abandoned at the deadline or when the sender is gone. Until that thread has ended, no other exchange starts with
the same sender.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from time import monotonic

import torch

from relax_actors.errors import StoreError
from relax_actors.weights.protocols import WeightPayload
from relax_actors.weights.transports.torch_transport import wire
from relax_actors.weights.transports.torch_transport.pair import RECEIVER, Pair, open_store
from relax_actors.weights.transports.torch_transport.sender import Address, request_pair

POLL_SECONDS = 0.1
"""Interval at which a running exchange is checked for a sender that has ended."""


class TransportError(StoreError):
    """Weights could not be received from the sender's memory; the file still has them."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """A pair, and an idle socket that is closed when the sender's process ends."""

    pair: Pair
    idle: socket.socket

    def is_closed(self) -> bool:
        """Whether the sender's process has ended."""
        try:
            return not self.idle.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.pair.close()
        self.idle.close()


class _Exchange(threading.Thread):
    """One request and its answer; `connection` can be used for the next one."""

    def __init__(
        self, connection: _Connection | None, address: Address, request: bytes, max_bytes: int, seconds: float
    ) -> None:
        super().__init__(name="transport", daemon=True)
        self.connection, self.address = connection, address
        self.payload: WeightPayload | None = None
        self.error: str | None = None
        self.nbytes = 0
        self.abandoned = False
        self._request, self._max_bytes = request, max_bytes
        self._seconds, self.deadline = seconds, monotonic() + seconds

    def run(self) -> None:
        """Connect if there is no connection, request, receive."""
        try:
            self.payload = self._exchange()
        except (RuntimeError, ValueError, OSError) as error:
            self.error = f"{type(error).__name__}: {error}"
        if self.error is not None or self.abandoned:
            connection, self.connection, self.payload = self.connection, None, None
            if connection is not None:
                connection.close()

    def _connect(self) -> _Connection:
        host, port, token = self.address.host, self.address.port, self.address.token
        idle = socket.create_connection((host, port), self._seconds)
        idle.setblocking(False)
        try:
            store = open_store(host, port, self._seconds)
            name = request_pair(store, token, self.deadline)
            pair = Pair(store, name, RECEIVER, idle.getsockname()[0], self._seconds)
            pair.send(wire.proof(token, pair.receive(wire.CHALLENGE, self.deadline)))
        except BaseException:
            idle.close()
            raise
        return _Connection(pair, idle)

    def _exchange(self) -> WeightPayload | None:
        self.connection = self.connection or self._connect()
        pair = self.connection.pair
        pair.send(self._request)
        header, nbytes = wire.parse_answer(pair.receive(wire.ANSWER, self.deadline))
        if not header:
            return None
        layout = wire.Layout.parse(pair.receive(header, self.deadline), nbytes, self._max_bytes)
        body = torch.empty(nbytes, dtype=torch.uint8)
        for start in range(0, nbytes, wire.CHUNK):
            if pair.receive(1, self.deadline) != wire.CHUNK_FOLLOWS:
                return None
            part = body[start : start + wire.CHUNK]
            pair.receive_into(part, self.deadline)
            self.nbytes += len(part)
        return WeightPayload(layout.base, layout.views(body))


class TorchReceiver:
    """Connection of one process to the current sender; used by one thread at a time.

    Args:
        seconds: deadline of `fetch`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._address: Address | None = None
        self._connection: _Connection | None = None
        self.exchange: _Exchange | None = None

    def fetch(self, address: Address, wanted: str, base: str, max_bytes: int) -> WeightPayload | None:
        """Receive the weights of a fingerprint; None if the sender no longer holds them.

        Only the form of the answer is verified, not its content.

        Args:
            address: of the sender.
            wanted: fingerprint of the weights.
            base: fingerprint of the weights that a delta may be to; empty for none.
            max_bytes: limit on the size of the tensors.

        Raises:
            TransportError: the exchange failed or took too long.
        """
        previous = self.exchange
        if previous is not None and previous.is_alive() and previous.address == address:
            msg = f"{address.host}:{address.port}: an earlier exchange still hangs"
            raise TransportError(msg)
        if address != self._address:
            self.close()
            self._address = address
        request = wire.request(wanted, base)
        exchange = _Exchange(self._connection, address, request, max_bytes, self._seconds)
        self.exchange, self._connection = exchange, None
        exchange.start()
        self._await(exchange)
        self._connection, exchange.connection = exchange.connection, None
        if exchange.error is not None:
            msg = f"{address.host}:{address.port}: {exchange.error}"
            raise TransportError(msg)
        payload, exchange.payload = exchange.payload, None
        return payload

    def _await(self, exchange: _Exchange) -> None:
        """Wait for an exchange; abandon it at its deadline, or when the sender's process has ended."""
        closed = False
        while exchange.is_alive() and not closed and monotonic() < exchange.deadline:
            exchange.join(POLL_SECONDS)
            connection = exchange.connection
            closed = connection is not None and connection.is_closed()
        if closed:
            exchange.join(POLL_SECONDS)  # its own error says more than "ended"
        if exchange.is_alive():
            exchange.abandoned = True
            why = "ended" if closed else f"took longer than {self._seconds:g} s"
            msg = f"{exchange.address.host}:{exchange.address.port} {why}"
            raise TransportError(msg)

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
