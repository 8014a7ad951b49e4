"""Sending end: sends the newest version to receivers that have the token.

Invariant: `offer` never waits for a receiver. Each receiver has a thread of its own, which references no more than the
chunk that it sends, so a replaced version is freed even in the middle of a transfer.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from time import monotonic

import torch

from relax_actors.errors import ConfigError
from relax_actors.weights.protocols import WeightPayload
from relax_actors.weights.transports.torch_transport import wire
from relax_actors.weights.transports.torch_transport.pair import IDLE_SECONDS, SENDER, Pair, Store, open_store

MAX_RECEIVERS = 1024


@dataclass(frozen=True, slots=True)
class Address:
    """Where a sender listens, and the token that receivers must prove to have."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class _Offer:
    fingerprint: str
    payloads: tuple[WeightPayload, ...]
    layouts: tuple[wire.Layout, ...]
    headers: tuple[bytes, ...]


class TorchSender:
    """Serves receivers until it is closed.

    Args:
        host: address of this machine to listen on.
        seconds: timeout of one message to a receiver.

    Raises:
        ConfigError: `host` is not an address of this machine.
    """

    def __init__(self, host: str, seconds: float) -> None:
        self._seconds = seconds
        self._offer: _Offer | None = None
        self._closing = False
        self._pairs: set[Pair] = set()
        # Without an existing socket, a TCPStore listens on all interfaces.
        try:
            listener = socket.create_server((host, 0), backlog=128)
        except OSError as error:
            msg = f"weights.listen = {host!r} cannot be listened on: {error}; name an address of the trainer's machine"
            raise ConfigError(msg) from error
        port = listener.getsockname()[1]
        self.address = Address(host, port, secrets.token_hex(32))
        self._store: Store = open_store(host, port, seconds, listener.detach())
        self._store.set("next", "0")
        self._acceptor = threading.Thread(target=self._accept, name="transport", daemon=True)
        self._acceptor.start()

    @property
    def connections(self) -> int:
        """Number of connected receivers."""
        return len(self._pairs)

    def offer(self, fingerprint: str, payloads: Sequence[WeightPayload]) -> None:
        """Serve these weights from now on, in place of the previous ones.

        A receiver gets the first of `payloads` that it can apply.

        Raises:
            ValueError: a tensor cannot be sent.
        """
        layouts = tuple(wire.Layout.of(payload) for payload in payloads)
        headers = tuple(layout.header() for layout in layouts)
        self._offer = _Offer(fingerprint, tuple(payloads), layouts, headers)

    def close(self) -> None:
        """Stop listening and answering.

        Connections end with the process, or when the receivers close them.
        """
        if self._closing:
            return
        self._closing, self._offer = True, None
        with suppress(RuntimeError):
            # Wakes the accepting thread.
            store = open_store(self.address.host, self.address.port, self._seconds)
            request_pair(store, self.address.token, monotonic() + 1)
            # Gloo prints a traceback if a thread still reads from the store when it is freed.
            self._acceptor.join(1.0)
        for pair in list(self._pairs):
            pair.close()
        self._store = None

    def _accept(self) -> None:
        """Make a pair for each request that proves to have the token."""
        host, port, token = self.address.host, self.address.port, self.address.token
        own = open_store(host, port, IDLE_SECONDS)
        for n in count():
            try:
                own.wait([f"knock/{n}"])
                name = _pair_name(token, n, own.get(f"knock/{n}"))
                own.set("next", str(n + 1))
            except RuntimeError:
                return
            if self._closing:
                return
            if name is not None and len(self._pairs) < MAX_RECEIVERS:
                threading.Thread(target=self._serve, args=(name,), name="transport-peer", daemon=True).start()

    def _serve(self, name: str) -> None:
        host, port = self.address.host, self.address.port
        pair: Pair | None = None
        try:
            pair = Pair(open_store(host, port, self._seconds), name, SENDER, host, self._seconds)
            self._pairs.add(pair)
            self.serve(pair)
        except (RuntimeError, ValueError):
            pass  # the receiver is gone, or broke the protocol; it reports its own failure and reconnects
        finally:
            if pair is not None:
                self._pairs.discard(pair)
                pair.close()

    def serve(self, pair: Pair) -> None:
        """Answer the requests of one receiver; return if it cannot prove to have the token.

        Raises:
            RuntimeError: the connection failed.
            ValueError: a request is malformed.
        """
        challenge = secrets.token_bytes(wire.CHALLENGE)
        pair.send(challenge)
        if not hmac.compare_digest(pair.receive(wire.PROOF), wire.proof(self.address.token, challenge)):
            return
        while not self._closing:
            wanted, base = wire.parse_request(pair.receive(wire.REQUEST, monotonic() + IDLE_SECONDS))
            self._answer(pair, wanted, base)

    def _answer(self, pair: Pair, wanted: str, base: str) -> None:
        index, header, nbytes = self._choose(wanted, base)
        pair.send(wire.answer(len(header), nbytes))
        if not header:
            return
        pair.send(header)
        chunk = torch.zeros(min(wire.CHUNK, nbytes), dtype=torch.uint8)
        for start in range(0, nbytes, wire.CHUNK):
            part = chunk[: nbytes - start]
            if not self._fill(wanted, index, start, part):
                pair.send(wire.RELEASED)
                return
            pair.send(wire.CHUNK_FOLLOWS)
            pair.send(part)

    def _choose(self, wanted: str, base: str) -> tuple[int, bytes, int]:
        """Return index, header and body length of the payload to send; empty header for none."""
        offer = self._offer
        if offer is not None and offer.fingerprint == wanted:
            for index, payload in enumerate(offer.payloads):
                if payload.base in (None, base):
                    return index, offer.headers[index], offer.layouts[index].nbytes
        return 0, b"", 0

    def _fill(self, wanted: str, index: int, start: int, chunk: torch.Tensor) -> bool:
        """Copy a chunk of the offered weights; return False if they were replaced.

        The thread holds no reference to them while it sends the chunk.
        """
        offer = self._offer
        if offer is None or offer.fingerprint != wanted:
            return False
        offer.layouts[index].fill(offer.payloads[index].tensors, start, chunk)
        return True


def request_pair(store: Store, token: str, deadline: float) -> str:
    """Ask a sender for a pair; return the name of the pair.

    The request is one atomic write at the first free number, so a receiver that dies here leaves no gap.

    Args:
        store: connection to the sender's store.
        token: of the sender.
        deadline: in seconds of `time.monotonic`.

    Raises:
        RuntimeError: the store does not answer, or no number is free before the deadline.
    """
    own = secrets.token_hex(16)
    n = int(store.get("next"))
    while monotonic() < deadline:
        value = f"{own}:{wire.proof(token, f'{n} {own}'.encode()).hex()}"
        if bytes(store.compare_set(f"knock/{n}", "", value)).decode(errors="replace") == value:
            return f"pair/{own}"
        n += 1
    msg = "no free number for a connection request; other receivers took all of them"
    raise RuntimeError(msg)


def _pair_name(token: str, n: int, value: bytes) -> str | None:
    """Return the name of the requested pair; None if the request lacks the token's proof."""
    own, _, received = value.decode(errors="replace").partition(":")
    expected = wire.proof(token, f"{n} {own}".encode()).hex()
    return f"pair/{own}" if hmac.compare_digest(received.encode(), expected.encode()) else None
