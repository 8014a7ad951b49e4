"""The sending end: holds what the newest version needs, and gives it to whoever proves to have the token.

Invariant: no caller of `offer` ever waits for a receiver. Each receiver has a thread of its own, which holds a
chunk of what it sends and no more: a version that was let go is let go in mid-transfer too.
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
from relax_actors.weights.protocol import Content
from relax_actors.weights.torch_transport import wire
from relax_actors.weights.torch_transport.pair import IDLE_SECONDS, SENDER, Pair, Store, open_store

MOST_PEERS = 1024


@dataclass(frozen=True, slots=True)
class Address:
    """Where a sender listens, and the token that it asks for."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class _Offer:
    fingerprint: str
    contents: tuple[Content, ...]
    layouts: tuple[wire.Layout, ...]
    headers: tuple[bytes, ...]


class TorchSender:
    """Listens until it is closed.

    Args:
        host: address of this machine to listen on.
        seconds: how long one message to a receiver may take.

    Raises:
        ConfigError: the address is not this machine's.
    """

    def __init__(self, host: str, seconds: float) -> None:
        self._seconds = seconds
        self._offer: _Offer | None = None
        self._closing = False
        self._peers: set[Pair] = set()
        # Left to itself a TCPStore listens on all interfaces.
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
        """Receivers that are connected."""
        return len(self._peers)

    def offer(self, fingerprint: str, contents: Sequence[Content]) -> None:
        """Give this out from now on, and nothing else; of several contents the first that is of use to a receiver.

        Raises:
            ValueError: they cannot be sent.
        """
        layouts = tuple(wire.Layout.of(content) for content in contents)
        headers = tuple(layout.header() for layout in layouts)
        self._offer = _Offer(fingerprint, tuple(contents), layouts, headers)

    def close(self) -> None:
        """Listen no more, and answer no more; connections end with the process, or as the other ends close them."""
        if self._closing:
            return
        self._closing, self._offer = True, None
        with suppress(RuntimeError):
            knock(open_store(self.address.host, self.address.port, self._seconds), self.address.token, monotonic() + 1)
            # A thread that still reads from the store when it goes prints a traceback of gloo.
            self._acceptor.join(1.0)
        for peer in list(self._peers):
            peer.close()
        self._store = None

    def _accept(self) -> None:
        """Make a pair for each knock that proves to have the token."""
        host, port, token = self.address.host, self.address.port, self.address.token
        own = open_store(host, port, IDLE_SECONDS)
        for n in count():
            try:
                own.wait([f"knock/{n}"])
                name = _admitted(token, n, own.get(f"knock/{n}"))
                own.set("next", str(n + 1))
            except RuntimeError:
                return
            if self._closing:
                return
            if name is not None and len(self._peers) < MOST_PEERS:
                threading.Thread(target=self._serve, args=(name,), name="transport-peer", daemon=True).start()

    def _serve(self, name: str) -> None:
        host, port = self.address.host, self.address.port
        pair: Pair | None = None
        try:
            pair = Pair(open_store(host, port, self._seconds), name, SENDER, host, self._seconds)
            self._peers.add(pair)
            self.serve(pair)
        except (RuntimeError, ValueError):
            pass  # the receiver is gone, or is none; it tells what it missed, and comes again
        finally:
            if pair is not None:
                self._peers.discard(pair)
                pair.close()

    def serve(self, pair: Pair) -> None:
        """Answer requests of one receiver, after it has proved to have the token; returns when it cannot.

        Raises:
            RuntimeError: the connection failed.
            ValueError: a request is none.
        """
        challenge = secrets.token_bytes(wire.CHALLENGE)
        pair.send(challenge)
        if not hmac.compare_digest(pair.receive(wire.PROOF), wire.proof(self.address.token, challenge)):
            return
        while not self._closing:
            wanted, here = wire.parse_request(pair.receive(wire.REQUEST, monotonic() + IDLE_SECONDS))
            self._answer(pair, wanted, here)

    def _answer(self, pair: Pair, wanted: str, here: str) -> None:
        which, header, nbytes = self._choose(wanted, here)
        pair.send(wire.answer(len(header), nbytes))
        if not header:
            return
        pair.send(header)
        chunk = torch.zeros(min(wire.CHUNK, nbytes), dtype=torch.uint8)
        for start in range(0, nbytes, wire.CHUNK):
            part = chunk[: nbytes - start]
            if not self._fill(wanted, which, start, part):
                pair.send(wire.LET_GO)
                return
            pair.send(wire.GOES_ON)
            pair.send(part)

    def _choose(self, wanted: str, here: str) -> tuple[int, bytes, int]:
        """Which content to send, its header and the length of its body; an empty header if there is none."""
        offer = self._offer
        if offer is not None and offer.fingerprint == wanted:
            for which, content in enumerate(offer.contents):
                if content.base in (None, here):
                    return which, offer.headers[which], offer.layouts[which].nbytes
        return 0, b"", 0

    def _fill(self, wanted: str, which: int, start: int, chunk: torch.Tensor) -> bool:
        """Copy a part of what is still on offer; the thread keeps no hold on it while it sends."""
        offer = self._offer
        if offer is None or offer.fingerprint != wanted:
            return False
        offer.layouts[which].fill(offer.contents[which].tensors, start, chunk)
        return True


def knock(store: Store, token: str, end: float) -> str:
    """Ask a sender for a pair, and give the name that it will have.

    A knock is written in one piece, at the first number that is free: one that dies over it leaves no gap.

    Raises:
        RuntimeError: the store does not answer, or no number is free until `end` of the monotonic clock.
    """
    own = secrets.token_hex(16)
    n = int(store.get("next"))
    while monotonic() < end:
        value = f"{own}:{wire.proof(token, f'{n} {own}'.encode()).hex()}"
        if bytes(store.compare_set(f"knock/{n}", "", value)).decode(errors="replace") == value:
            return f"pair/{own}"
        n += 1
    msg = "others knocked all the time"
    raise RuntimeError(msg)


def _admitted(token: str, n: int, value: bytes) -> str | None:
    """Name of the pair that a knock asks for; None if it does not prove to have the token."""
    own, _, given = value.decode(errors="replace").partition(":")
    right = wire.proof(token, f"{n} {own}".encode()).hex()
    return f"pair/{own}" if hmac.compare_digest(given.encode(), right.encode()) else None
