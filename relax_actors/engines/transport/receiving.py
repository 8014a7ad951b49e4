"""The receiving end: one connection, kept until it fails; no call takes longer than its deadline.

A process that is stopped answers nothing and closes nothing, and torch can wait for it in calls that have no deadline.
So each exchange runs in a thread that is let go of when time is up; until that one has ended no other begins.
"""

from __future__ import annotations

import socket
import threading
from time import monotonic

import torch

from relax_actors.engines.taking import Content
from relax_actors.engines.transport import wire
from relax_actors.engines.transport.pair import RECEIVER, Pair, open_store
from relax_actors.engines.transport.sending import Address, knock
from relax_actors.errors import StoreError


class TransportError(StoreError):
    """Weights could not be had from the sender's memory; the file has them."""


class _Exchange(threading.Thread):
    """One request with its answer; `pair` is the connection to go on with."""

    def __init__(self, pair: Pair | None, address: Address, ask: bytes, most: int, seconds: float) -> None:
        super().__init__(name="transport", daemon=True)
        self.pair = pair
        self.content: Content | None = None
        self.error: str | None = None
        self.nbytes = 0
        self.abandoned = False
        self._address, self._ask, self._most = address, ask, most
        self._seconds, self._end = seconds, monotonic() + seconds

    def run(self) -> None:
        """Connect if need be, ask, receive."""
        try:
            self.content = self._exchange()
        except (RuntimeError, ValueError, OSError) as error:
            self.error = f"{type(error).__name__}: {error}"
        if self.error is not None or self.abandoned:
            pair, self.pair, self.content = self.pair, None, None
            if pair is not None:
                pair.close()

    def _connect(self) -> Pair:
        host, port, token = self._address.host, self._address.port, self._address.token
        with socket.create_connection((host, port), self._seconds) as probe:
            own = probe.getsockname()[0]
        store = open_store(host, port, self._seconds)
        pair = Pair(store, knock(store, token, self._end), RECEIVER, own, self._seconds)
        pair.send(wire.proof(token, pair.receive(wire.CHALLENGE, self._end)))
        return pair

    def _exchange(self) -> Content | None:
        self.pair = pair = self.pair or self._connect()
        pair.send(self._ask)
        header, nbytes = wire.parse_answer(pair.receive(wire.ANSWER, self._end))
        if not header:
            return None
        layout = wire.Layout.parse(pair.receive(header, self._end), nbytes, self._most)
        body = torch.empty(nbytes, dtype=torch.uint8)
        for start in range(0, nbytes, wire.CHUNK):
            if pair.receive(1, self._end) != wire.GOES_ON:
                return None
            part = body[start : start + wire.CHUNK]
            pair.receive_into(part, self._end)
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
        self._pair: Pair | None = None
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
        if self.exchange is not None and self.exchange.is_alive():
            msg = "an earlier exchange still hangs"
            raise TransportError(msg)
        if address != self._address:
            self.close()
            self._address = address
        exchange = _Exchange(self._pair, address, wire.request(wanted, here), most, self._seconds)
        self.exchange, self._pair = exchange, None
        exchange.start()
        exchange.join(self._seconds)
        if exchange.is_alive():
            exchange.abandoned = True
            msg = f"{address.host}:{address.port} took longer than {self._seconds:g} s"
            raise TransportError(msg)
        self._pair, exchange.pair = exchange.pair, None
        if exchange.error is not None:
            msg = f"{address.host}:{address.port}: {exchange.error}"
            raise TransportError(msg)
        content, exchange.content = exchange.content, None
        return content

    def close(self) -> None:
        """End the connection."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()
