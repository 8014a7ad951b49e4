"""Reading from JetStream: a standing pull with credit, and a follower that reads columns in order.

`StandingPull` serves the actors of a pool: messages are theirs until acknowledged. `Follower` serves roles that own
state and monitors: it needs no acknowledgement and rebuilds its consumer where it stopped, whatever happens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError

from broker.connection import Bridge

EXPIRES, IDLE_EXPIRES = 1.0, 4.0
_GRACE = 0.3
_GONE = ("404", "503")


class Delivery(NamedTuple):
    """One delivery of a message by a durable consumer: how many there were of it, and its place in both."""

    deliveries: int
    stream_sequence: int
    consumer_sequence: int


async def give_back(bridge: Bridge, stream: str, consumer: str, deliveries: Iterable[Delivery]) -> None:
    """Let what a reader that died had taken be delivered again at once; what it had acknowledged is left alone."""
    for delivery in deliveries:
        await bridge.nc.publish(f"$JS.ACK.{stream}.{consumer}.{'.'.join(map(str, delivery))}.0.0", b"-NAK")


def comes_again(message: Msg) -> bool:
    """Whether a message was delivered before: to one who did not acknowledge it."""
    return (message.metadata.num_delivered or 1) > 1


class StandingPull:
    """Keeps up to `credit` messages asked for or waiting, of one consumer.

    An unanswered request may die unnoticed with the server that held it, so each lives for a second only, up to four
    where nothing comes, and is then asked again; after a reconnection at once.
    `took` is told of every message as it arrives. With `ahead`, more is asked for while what was taken is worked on.
    """

    def __init__(
        self,
        bridge: Bridge,
        stream: str,
        consumer: str,
        credit: int,
        took: Callable[[Delivery], None] | None = None,
        *,
        ahead: bool = True,
    ) -> None:
        self.credit = credit
        self._ahead = ahead
        self.gone = False
        self._woken = False
        self._bridge = bridge
        self._took = took
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = bridge.nc.new_inbox()
        self._turn = 0
        self._waiting: deque[Msg] = deque()
        self._arrived = asyncio.Event()
        self._asked = 0
        self._asked_until = 0.0
        self._expires = EXPIRES
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Subscribe; call once, in the bridge's loop."""
        self._subscription = await self._bridge.nc.subscribe(f"{self._inbox}.*", cb=self._on_message)
        self._bridge.on_reconnect.append(self._on_reconnect)

    async def _on_reconnect(self) -> None:
        self._forget()
        self._expires = EXPIRES
        self._arrived.set()

    def _forget(self) -> None:
        """Take what was asked for as unanswered for good: what the server says of it from now on counts not."""
        self._turn, self._asked, self._asked_until = self._turn + 1, 0, 0.0

    async def _on_message(self, message: Msg) -> None:
        # The server's own answers have no address for an acknowledgement; a stored message may have any header.
        status = None if message.reply else (message.headers or {}).get("Status")
        if message.reply:
            self._asked -= 1
            self._expires = EXPIRES
            self._waiting.append(message)
            if self._took is not None and (known := message.metadata).sequence is not None:
                self._took(Delivery(known.num_delivered or 1, known.sequence.stream, known.sequence.consumer))
        elif message.subject == f"{self._inbox}.{self._turn}":
            pending = (message.headers or {}).get("Nats-Pending-Messages", "0")
            self._asked -= int(pending) if pending.isdigit() else 0
            self._expires = min(2 * self._expires, IDLE_EXPIRES)
            text = (message.headers or {}).get("Description", "")
            self.gone = status in _GONE or "Deleted" in text
            if self.gone:
                self._asked = 0
        self._arrived.set()

    async def _refill(self, most: int | None = None) -> None:
        now = time.monotonic()
        # Who takes more in may have no use for it a moment later: others need not wait for what comes then.
        expires = self._expires if most is None else EXPIRES
        if self._asked and now > self._asked_until + _GRACE:
            self._forget()
        self._asked = max(0, self._asked)
        wanted = (self.credit if most is None else most) - len(self._waiting) - self._asked
        few = most is None and wanted * 2 < self.credit
        if few or wanted <= 0 or not self._bridge.nc.is_connected:
            return
        self._asked += wanted
        self._asked_until = max(self._asked_until, now + expires)
        request = json.dumps({"batch": wanted, "expires": int(expires * 1e9)}).encode()
        await self._bridge.nc.publish(self._next, request, reply=f"{self._inbox}.{self._turn}")

    async def next(self, limit: int, patience: float, linger: float = 0.0) -> list[Msg]:
        """Up to `limit` messages, as soon as there is one; none after `patience` seconds, when `gone` or woken up.

        Args:
            limit: at most so many.
            patience: seconds to wait for the first.
            linger: seconds to wait for more once the first is there.
        """
        end = time.monotonic() + patience
        while not (self._waiting or self.gone or self._woken) and (left := end - time.monotonic()) > 0:
            self._arrived.clear()
            await self._refill()
            if self._waiting:
                break
            try:
                await asyncio.wait_for(self._arrived.wait(), min(left, self._expires + _GRACE))
            except TimeoutError:
                continue
        end = time.monotonic() + linger
        while 0 < len(self._waiting) < limit and (left := end - time.monotonic()) > 0:
            self._arrived.clear()
            await self._refill()
            if len(self._waiting) >= limit:
                break
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                break
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        if not self.gone and self._ahead:
            await self._refill()
        return taken

    async def more(self, limit: int) -> list[Msg]:
        """What is here, up to `limit`, without waiting; what lacks is asked for, to be here another time.

        None from the first on that comes again: `next` gives it.
        """
        if self._woken or any(map(comes_again, self._waiting)):
            return []
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        if not self.gone:
            await self._refill(limit - len(taken))
        return taken

    def expects(self, limit: int) -> bool:
        """Whether `more` would find none and ask for none: what it would ask for is asked for. From any thread."""
        asked = not self._waiting and self._asked >= limit and time.monotonic() <= self._asked_until + _GRACE
        return self._woken or asked

    def wake(self) -> None:
        """Let `next` return from now on without waiting."""
        self._woken = True
        self._arrived.set()

    @property
    def waiting(self) -> list[Msg]:
        """Messages that came and were not taken yet; their deadlines run."""
        return list(self._waiting)

    def drain(self) -> list[Msg]:
        """Take back all that wait."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    async def close(self) -> None:
        """Unsubscribe; without a connection too, or each that the server drops would be renewed for ever."""
        with suppress(ValueError):
            self._bridge.on_reconnect.remove(self._on_reconnect)
        if self._subscription is not None:
            with suppress(nats.errors.Error):
                await self._subscription.unsubscribe()


class Follower:
    """Reads the messages of some subjects of a stream in order, from `start` on and for ever.

    The consumer behind it is the server's memory; if it is lost, with the server or by a gap, it is made again
    after the last message that was given out. Nothing is given out twice.

    Args:
        bridge: the connection.
        stream: name of the stream.
        filters: subjects to read.
        start: first stream sequence.
        headers_only: leave the payloads out.
        credit: messages in flight.
    """

    def __init__(
        self,
        bridge: Bridge,
        stream: str,
        filters: list[str],
        *,
        start: int = 1,
        headers_only: bool = False,
        credit: int = 256,
    ) -> None:
        self.backlog: int | None = None
        self._bridge = bridge
        self._stream = stream
        self._filters = filters
        self._next = start
        self._headers_only = headers_only
        self._credit = credit
        self._pull: StandingPull | None = None
        self._consumer = ""
        self._delivered = 0
        self._woken = False
        self.drained = False
        """Whether the last empty batch came because there was nothing left to read."""

    def wake(self) -> None:
        """Let `batches` yield from now on without waiting."""
        self._woken = True
        if self._pull is not None:
            self._pull.wake()

    async def _open(self) -> StandingPull:
        spec = ConsumerConfig(
            filter_subjects=self._filters,
            ack_policy=AckPolicy.NONE,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self._next,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=60.0,
            headers_only=self._headers_only or None,
            max_deliver=1,
        )

        async def create() -> Any:
            return await self._bridge.js.add_consumer(self._stream, spec)

        info = await self._bridge.persist(create, f"follow {', '.join(self._filters)}")
        self._consumer, self._delivered = info.name, 0
        if self.backlog is None:
            self.backlog = info.num_pending or 0
        pull = StandingPull(self._bridge, self._stream, info.name, self._credit)
        await pull.start()
        return pull

    async def _alive(self) -> bool:
        """Whether the consumer is there and nothing that it sent was lost with a connection."""
        try:
            info = await self._bridge.js.consumer_info(self._stream, self._consumer)
        except NotFoundError:
            return False
        except (nats.errors.Error, APIError, TimeoutError):
            return True
        sent = info.delivered.consumer_seq if info.delivered else 0
        if sent > self._delivered and not (self._pull and self._pull.waiting):
            return False
        self.drained = sent == self._delivered and info.num_pending == 0
        return True

    async def batches(self, limit: int = 256, tick: float = 5.0) -> AsyncIterator[list[Msg]]:
        """Yield messages as they come, in order; an empty list after `tick` seconds without any."""
        while True:
            if self._pull is None:
                self._pull = await self._open()
                if self._woken:
                    self._pull.wake()
            taken = await self._pull.next(limit, tick)
            good = []
            for message in taken:
                sequence = message.metadata.sequence
                if sequence is None or sequence.consumer != self._delivered + 1:
                    self._pull.gone = True
                    break
                self._delivered += 1
                self._next = sequence.stream + 1
                good.append(message)
            lost = not taken and not await self._alive()
            if good or not taken:
                yield good
            if self._pull is not None and (self._pull.gone or lost):
                await self.close()
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Let the consumer go; without it the server would keep it for a minute."""
        if self._pull is None:
            return
        await self._pull.close()
        self._pull = None
        with suppress(nats.errors.Error, APIError, TimeoutError):
            await self._bridge.js.delete_consumer(self._stream, self._consumer)
