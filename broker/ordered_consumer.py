"""Ordered consumer: reads subjects of a stream in stream order, without acknowledgements.

Roles that own state and monitors use it. A monitor creates a consumer of its own in the server's memory; a role resets
the durable consumer that the owner of the run created for it, because a client that may create consumers can have the
server deliver any message to any subject.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError

from broker.connection import Connection
from broker.pull import PullSubscription, delivery_of
from broker.streams import wait_for_consumer

RESET_SECONDS = 5.0


class OrderedConsumer:
    """Reads the messages of some subjects of a stream in order, from `start` on, forever.

    If the consumer is lost, with the server or by a gap in its sequence, it is created again (or reset) after the last
    returned message. No message is returned twice. All coroutines run in the connection's loop.

    Args:
        connection: the process's connection.
        stream: name of the stream.
        filters: subjects to read; with `durable`, those of the consumer.
        durable: name of a durable consumer of `follow_spec`, with one reader at a time; None creates a consumer.
        before_reset: awaited before `durable` is reset; raises if another process reads it now.
        start: first stream sequence to read.
        headers_only: omit the payloads.
        credit: maximum number of messages requested or buffered.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        filters: list[str],
        *,
        durable: str | None = None,
        before_reset: Callable[[], Awaitable[None]] | None = None,
        start: int = 1,
        headers_only: bool = False,
        credit: int = 256,
    ) -> None:
        self.backlog: int | None = None
        """Number of matching messages when the consumer was first created; None before."""
        self.drained = False
        """Whether the last empty batch came because all messages had been read."""
        self._connection = connection
        self._stream = stream
        self._filters = filters
        self._durable, self._before_reset = durable, before_reset
        self._next = start
        self._headers_only = headers_only
        self._credit = credit
        self._pull: PullSubscription | None = None
        self._consumer = ""
        self._delivered = 0
        self._woken = False

    @property
    def has_messages(self) -> bool:
        """Whether messages have arrived that were not read yet. Thread-safe."""
        return self._pull is not None and bool(self._pull.buffered)

    def wake(self) -> None:
        """Make `batches` yield without waiting from now on."""
        self._woken = True
        if self._pull is not None:
            self._pull.wake()

    async def _open(self) -> PullSubscription:
        info = await (self._create() if self._durable is None else self._reset(self._durable))
        self._consumer, self._delivered = info["name"], 0
        if self.backlog is None:
            self.backlog = int(info.get("num_pending", 0))
            # In a cluster the server of the consumer may not have all messages yet.
            self.drained = self.backlog == 0 and not info.get("cluster")
        pull = PullSubscription(self._connection, self._stream, self._consumer, self._credit)
        await pull.start()
        return pull

    async def _create(self) -> dict[str, Any]:
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
            return await self._connection.js.add_consumer(self._stream, spec)

        info = await self._connection.retry(create, f"follow {', '.join(self._filters)}")
        return {"name": info.name, "num_pending": info.num_pending or 0, "cluster": info.cluster}

    async def _reset(self, name: str) -> dict[str, Any]:
        """Reset the durable consumer to sequence `_next`; its own sequence restarts at 1."""
        await wait_for_consumer(self._connection, self._stream, name)
        if self._before_reset is not None:
            await self._before_reset()
        js, subject = self._connection.js, f"$JS.API.CONSUMER.RESET.{self._stream}.{name}"
        body = json.dumps({"seq": self._next}).encode()

        async def reset() -> dict[str, Any]:
            return await js._api_request(subject, body, timeout=RESET_SECONDS)  # noqa: SLF001 nats-py has no such request

        return await self._connection.retry(reset, f"reset consumer {name} of {self._stream}")

    async def _is_intact(self) -> bool:
        """Whether the consumer exists and none of its messages was lost with a connection."""
        try:
            info = await self._connection.js.consumer_info(self._stream, self._consumer)
        except NotFoundError:
            return False
        except (nats.errors.Error, APIError, TimeoutError):
            return True
        sent = info.delivered.consumer_seq if info.delivered else 0
        if sent > self._delivered and not (self._pull and self._pull.buffered):
            return False
        self.drained = sent == self._delivered and info.num_pending == 0
        return True

    async def batches(self, limit: int = 256, tick: float = 5.0) -> AsyncIterator[list[Msg]]:
        """Yield lists of at most `limit` messages in stream order.

        Yields an empty list after `tick` seconds without a message, and at the start at once if the subjects are empty.
        """
        while True:
            if self._pull is None:
                is_first = self.backlog is None
                self._pull = await self._open()
                if self._woken:
                    self._pull.wake()
                if is_first and self.drained:
                    yield []
            taken = await self._pull.fetch(limit, tick)
            good = []
            for message in taken:
                delivery = delivery_of(message)
                if delivery is None or delivery.consumer_sequence != self._delivered + 1:
                    self._pull.consumer_lost = True
                    break
                self._delivered += 1
                self._next = delivery.stream_sequence + 1
                good.append(message)
            lost = not taken and not await self._is_intact()
            if good or not taken:
                yield good
            if self._pull is not None and (self._pull.consumer_lost or lost):
                await self.close()
                await asyncio.sleep(0.05)

    async def read_all(self, *, caught_up: bool = True) -> list[Msg]:
        """Return the stream's messages and close; with `caught_up`, new messages as well."""
        collected: list[Msg] = []
        try:
            async for messages in self.batches(tick=0.5):
                collected += messages
                is_at_end = messages[-1].metadata.num_pending == 0 if messages else self.drained
                if is_at_end or (len(collected) >= (self.backlog or 0) and not caught_up):
                    break
        finally:
            await self.close()
        return collected

    async def close(self) -> None:
        """End the subscription, and delete a consumer that was created for it."""
        if self._pull is None:
            return
        await self._pull.close()
        self._pull = None
        if self._durable is not None:
            return
        with suppress(nats.errors.Error, APIError, TimeoutError):
            await self._connection.js.delete_consumer(self._stream, self._consumer)
