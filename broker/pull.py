"""Pull subscription to a durable consumer that the actors of a pool share.

A message belongs to the actor that received it until the actor acknowledges it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from broker.connection import Connection
from broker.streams import OVERFLOW

EXPIRES, IDLE_EXPIRES = 1.0, 4.0
"""Seconds after which a pull request expires: while messages arrive, and at most when none do."""
_GRACE = 0.3
_CONSUMER_LOST = ("404", "503")
_ACK = "$JS.ACK."
ACK_SECONDS = 5.0
"""Seconds to wait for the server's answer to an acknowledgement."""
_FIRST_NUMBER, _FIRST_NUMBER_OF_NEW = {9: 4}, 6
"""Position of the number of deliveries in an acknowledgement subject, by its number of tokens."""


class Delivery(NamedTuple):
    """One delivery of a message by a durable consumer, as its acknowledgement subject names it."""

    deliveries: int
    """Number of times the message has been delivered."""
    stream_sequence: int
    consumer_sequence: int


async def nak_deliveries(connection: Connection, stream: str, consumer: str, deliveries: Iterable[Delivery]) -> None:
    """Have deliveries to a dead actor redelivered at once, except acknowledged ones."""
    for delivery in deliveries:
        await connection.nc.publish(f"$JS.ACK.{stream}.{consumer}.{'.'.join(map(str, delivery))}.0.0", b"-NAK")


async def acknowledge(connection: Connection, stream: str, consumer: str, sequence: int) -> None:
    """Acknowledge a message that another client holds, and wait for the server's answer.

    Without effect if the message is acknowledged already.
    """
    delivery = Delivery(1, sequence, 1)
    subject = f"{_ACK}{stream}.{consumer}.{'.'.join(map(str, delivery))}.0.0"

    async def request() -> Msg:
        return await connection.nc.request(subject, b"+ACK", ACK_SECONDS)

    await connection.retry(request, f"acknowledge a message of {consumer}")


def delivery_of(message: Msg) -> Delivery | None:
    """Parse the acknowledgement subject of a delivery; None for any other subject.

    `$JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<consumer sequence>.<time>.<pending>`, with a domain and
    an account in front of the stream on newer servers. `Msg.metadata` parses the time, too, which costs more.
    """
    tokens = message.reply.split(".")
    first = _FIRST_NUMBER.get(len(tokens), _FIRST_NUMBER_OF_NEW)
    try:
        return Delivery(*map(int, tokens[first : first + 3])) if message.reply.startswith(_ACK) else None
    except (ValueError, TypeError):
        return None


def is_redelivery(message: Msg) -> bool:
    """Whether a message was delivered before, to an actor that did not acknowledge it."""
    delivery = delivery_of(message)
    return delivery is not None and delivery.deliveries > 1


class PullSubscription:
    """Continuous pull from one consumer, with at most `credit` messages requested or buffered.

    A pull request can be lost unnoticed with the server that held it. So each expires after `EXPIRES` seconds, up to
    `IDLE_EXPIRES` while no messages arrive, and is then repeated; after a reconnect it is repeated at once.
    All coroutines run in the connection's loop.

    Args:
        connection: the process's connection.
        stream: name of the stream.
        consumer: name of the durable consumer.
        credit: maximum number of messages requested or buffered.
        on_delivery: called with every delivery when it arrives.
        prefetch: request more messages while the fetched ones are handled.
        asks: ask the server what waits before each wait, so that `is_drained` is exact without `prefetch`, too.
        backlog: for a consumer with the group `OVERFLOW`, how many messages must wait there before this subscription
            gets any; 0 for no condition. Called with each request. None for a consumer without the group.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumer: str,
        credit: int,
        on_delivery: Callable[[Delivery], None] | None = None,
        *,
        prefetch: bool = True,
        asks: bool = False,
        backlog: Callable[[], int] | None = None,
    ) -> None:
        self.credit = credit
        self.consumer_lost = False
        """Whether the server reported that the consumer does not exist or is not available."""
        self._prefetch, self._asks, self._backlog = prefetch, asks, backlog
        self._woken = self._nudged = False
        self._connection = connection
        self._on_delivery = on_delivery
        self._request_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = connection.nc.new_inbox()
        self._generation = 0
        self._buffer: deque[Msg] = deque()
        self._arrived = asyncio.Event()
        self._requested = 0
        self._requested_until = 0.0
        self._asking = False
        self._expires = EXPIRES
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Subscribe. Call once."""
        self._subscription = await self._connection.nc.subscribe_direct(f"{self._inbox}.*", self._on_message)
        self._connection.on_reconnect.append(self._on_reconnect)

    async def _on_reconnect(self) -> None:
        self._forget_requests()
        self._expires = EXPIRES
        self._arrived.set()

    def _forget_requests(self) -> None:
        """Treat the pending requests as lost; later status messages about them are ignored."""
        self._generation, self._requested, self._requested_until = self._generation + 1, 0, 0.0
        self._asking = False

    def _on_message(self, message: Msg) -> None:
        # Status messages of the server have no reply subject. Stored messages do, and may have any header.
        status = None if message.reply else (message.headers or {}).get("Status")
        if message.reply:
            self._requested -= 1
            self._expires = EXPIRES
            self._buffer.append(message)
            if self._on_delivery is not None and (delivery := delivery_of(message)) is not None:
                self._on_delivery(delivery)
        elif message.subject == f"{self._inbox}.{self._generation}" and self._asking:
            self._asking, self._requested, self.consumer_lost = False, 0, status == "503"
        elif message.subject == f"{self._inbox}.{self._generation}":
            pending = (message.headers or {}).get("Nats-Pending-Messages", "0")
            self._requested -= int(pending) if pending.isdigit() else 0
            self._expires = min(2 * self._expires, IDLE_EXPIRES)
            text = (message.headers or {}).get("Description", "")
            self.consumer_lost = status in _CONSUMER_LOST or "Deleted" in text
            if self.consumer_lost:
                self._requested = 0
        self._arrived.set()

    async def _refill(self, most: int | None = None) -> None:
        """Request messages up to `most`; by default up to the credit, once half of it is free."""
        now = time.monotonic()
        # Requests of `fetch_nowait` expire early: the caller may have no room for the messages a moment later, and
        # other actors should not have to wait for them.
        expires = self._expires if most is None else EXPIRES
        if self._requested and now > self._requested_until + _GRACE:
            self._forget_requests()
        if self._asking:
            return
        self._requested = max(0, self._requested)
        wanted = (self.credit if most is None else most) - len(self._buffer) - self._requested
        few = most is None and wanted * 2 < self.credit
        if few or wanted <= 0 or not self._connection.nc.is_connected:
            return
        self._requested_until = max(self._requested_until, now + expires)
        await self._request(wanted, expires=int(expires * 1e9))

    async def _ask(self) -> None:
        """Request the messages that wait, and learn at once whether none does.

        Not while a request waits at the server, which would have been answered, nor where a condition holds it back.
        """
        if self._requested or not self._connection.nc.is_connected or "min_pending" in self._condition():
            return
        self._asking, self._requested_until = True, time.monotonic() + EXPIRES
        await self._request(self.credit, no_wait=True)

    async def _request(self, number: int, **fields: int) -> None:
        self._requested += number
        request = json.dumps({"batch": number, **fields, **self._condition()}).encode()
        await self._connection.nc.publish(self._request_subject, request, reply=f"{self._inbox}.{self._generation}")

    def _condition(self) -> dict[str, str | int]:
        """Return the fields of a request that say when it may be answered."""
        if self._backlog is None:
            return {}
        return {"group": OVERFLOW, **({"min_pending": least} if (least := self._backlog()) > 0 else {})}

    async def fetch(self, limit: int, timeout: float, linger: float = 0.0) -> list[Msg]:  # noqa: ASYNC109 returns an empty list
        """Return up to `limit` messages as soon as there is one, or after `linger` more seconds.

        The list is empty after `timeout` seconds without a message, after `wake` or `nudge`, or if the consumer is
        lost.
        """
        end, asked = time.monotonic() + timeout, False
        while not (self._buffer or self.consumer_lost or self._woken) and (left := end - time.monotonic()) > 0:
            self._arrived.clear()
            if self._asks and not asked:
                await self._ask()
                asked = True
            await self._refill()
            if self._buffer or self._nudged:
                break
            try:
                await asyncio.wait_for(self._arrived.wait(), min(left, self._expires + _GRACE))
            except TimeoutError:
                continue
        self._nudged = False
        end = time.monotonic() + linger
        while 0 < len(self._buffer) < limit and (left := end - time.monotonic()) > 0:
            self._arrived.clear()
            await self._refill()
            if len(self._buffer) >= limit:
                break
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                break
        taken = [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]
        if not self.consumer_lost and self._prefetch:
            await self._refill()
        return taken

    async def fetch_nowait(self, limit: int, waits: Callable[[Msg], bool] = is_redelivery) -> list[Msg]:
        """Return up to `limit` buffered messages without waiting, and request the rest.

        If a message that `waits` is buffered, the list is empty: `fetch` returns it.
        """
        if self._woken or any(map(waits, self._buffer)):
            return []
        taken = [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]
        if not self.consumer_lost:
            await self._refill(limit - len(taken))
        return taken

    def is_requested(self, limit: int) -> bool:
        """Whether `fetch_nowait(limit)` would return and request nothing. Thread-safe."""
        pending = not self._buffer and self._requested >= limit and time.monotonic() <= self._requested_until + _GRACE
        return self._woken or pending

    @property
    def is_drained(self) -> bool:
        """Whether no message waits here, and none did at the server when the pending request came. Thread-safe."""
        return not self._buffer and self._requested > 0 and not self._asking

    def wake(self) -> None:
        """Make `fetch` return without waiting from now on."""
        self._woken = True
        self._arrived.set()

    def nudge(self) -> None:
        """Make the running or the next `fetch` request messages; does not wait."""
        self._nudged = True
        self._arrived.set()

    @property
    def buffered(self) -> list[Msg]:
        """Messages that arrived and were not fetched yet; their `ack_wait` is running."""
        return list(self._buffer)

    def drain(self) -> list[Msg]:
        """Remove and return all buffered messages."""
        taken = list(self._buffer)
        self._buffer.clear()
        return taken

    async def close(self) -> None:
        """Unsubscribe.

        Also done while disconnected, because nats-py restores subscriptions at every reconnect.
        """
        with suppress(ValueError):
            self._connection.on_reconnect.remove(self._on_reconnect)
        if self._subscription is not None:
            with suppress(nats.errors.Error):
                await self._subscription.unsubscribe()
