"""The receiving end: one connection, kept until it fails; no call takes longer than its deadline.

A process that is stopped answers nothing and closes nothing, and torch can wait for it in calls that have no deadline;
of one that dies in the middle of a message gloo tells nothing before its own. So each exchange runs in a thread that is
let go of when time is up or the sender is gone; until it has ended no other begins with the same sender.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from time import monotonic

import torch

from relax_actors.errors import StoreError
from relax_actors.weights.protocol import Content
from relax_actors.weights.torch_transport import wire
from relax_actors.weights.torch_transport.pair import RECEIVER, Pair, open_store
from relax_actors.weights.torch_transport.sender import Address, knock

LOOK_SECONDS = 0.1
"""A sender that has ended is noticed so soon."""


class TransportError(StoreError):
    """Weights could not be had from the sender's memory; the file has them."""


@dataclass(frozen=True, slots=True)
class _Link:
    """A connection: the pair, and a socket on which nothing is ever said, to be told when the sender is gone."""

    pair: Pair
    line: socket.socket

    def gone(self) -> bool:
        """Whether the sender's process has ended."""
        try:
            return not self.line.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.pair.close()
        self.line.close()


class _Exchange(threading.Thread):
    """One request with its answer; `link` is the connection to go on with."""

    def __init__(self, link: _Link | None, address: Address, ask: bytes, most: int, seconds: float) -> None:
        super().__init__(name="transport", daemon=True)
        self.link, self.address = link, address
        self.content: Content | None = None
        self.error: str | None = None
        self.nbytes = 0
        self.abandoned = False
        self._ask, self._most = ask, most
        self._seconds, self.end = seconds, monotonic() + seconds

    def run(self) -> None:
        """Connect if need be, ask, receive."""
        try:
            self.content = self._exchange()
        except (RuntimeError, ValueError, OSError) as error:
            self.error = f"{type(error).__name__}: {error}"
        if self.error is not None or self.abandoned:
            link, self.link, self.content = self.link, None, None
            if link is not None:
                link.close()

    def _connect(self) -> _Link:
        host, port, token = self.address.host, self.address.port, self.address.token
        line = socket.create_connection((host, port), self._seconds)
        line.setblocking(False)
        try:
            store = open_store(host, port, self._seconds)
            pair = Pair(store, knock(store, token, self.end), RECEIVER, line.getsockname()[0], self._seconds)
            pair.send(wire.proof(token, pair.receive(wire.CHALLENGE, self.end)))
        except BaseException:
            line.close()
            raise
        return _Link(pair, line)

    def _exchange(self) -> Content | None:
        self.link = self.link or self._connect()
        pair = self.link.pair
        pair.send(self._ask)
        header, nbytes = wire.parse_answer(pair.receive(wire.ANSWER, self.end))
        if not header:
            return None
        layout = wire.Layout.parse(pair.receive(header, self.end), nbytes, self._most)
        body = torch.empty(nbytes, dtype=torch.uint8)
        for start in range(0, nbytes, wire.CHUNK):
            if pair.receive(1, self.end) != wire.GOES_ON:
                return None
            part = body[start : start + wire.CHUNK]
            pair.receive_into(part, self.end)
            self.nbytes += len(part)
        return Content(layout.base, layout.views(body))


class TorchReceiver:
    """One process's connection to the sender of the day; for one thread at a time.

    Args:
        seconds: deadline of `fetch`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._address: Address | None = None
        self._link: _Link | None = None
        self.exchange: _Exchange | None = None

    def fetch(self, address: Address, wanted: str, here: str, most: int) -> Content | None:
        """What leads to the weights of a fingerprint from those that are here; None if the sender has let them go.

        Nothing of it has been verified but its form.

        Args:
            address: of the sender.
            wanted: fingerprint.
            here: fingerprint of what a delta may be to; empty if nothing is here.
            most: bytes that the tensors may have.

        Raises:
            TransportError: it failed, or took too long.
        """
        hanging = self.exchange
        if hanging is not None and hanging.is_alive() and hanging.address == address:
            msg = "an earlier exchange still hangs"
            raise TransportError(msg)
        if address != self._address:
            self.close()
            self._address = address
        exchange = _Exchange(self._link, address, wire.request(wanted, here), most, self._seconds)
        self.exchange, self._link = exchange, None
        exchange.start()
        gone = False
        while exchange.is_alive() and not gone and monotonic() < exchange.end:
            exchange.join(LOOK_SECONDS)
            link = exchange.link
            gone = link is not None and link.gone()
        if gone:
            exchange.join(LOOK_SECONDS)  # it may be about to say more
        if exchange.is_alive():
            exchange.abandoned = True
            why = "ended" if gone else f"took longer than {self._seconds:g} s"
            msg = f"{address.host}:{address.port} {why}"
            raise TransportError(msg)
        self._link, exchange.link = exchange.link, None
        if exchange.error is not None:
            msg = f"{address.host}:{address.port}: {exchange.error}"
            raise TransportError(msg)
        content, exchange.content = exchange.content, None
        return content

    def close(self) -> None:
        """End the connection."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
