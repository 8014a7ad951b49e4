"""What a client does to the rows of a pool with the credentials of a user."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from nats.aio.msg import Msg

from broker.connection import Connection
from broker.pull import PullSubscription
from broker.subjects import Subjects
from tests.support.guarded import Guarded

DELAY_FOR_GOOD = b'-NAK {"delay": 9000000000000000000}'
"""Returns a message, to be delivered again in 285 years."""


class PoolClient:
    """A client that pulls from the consumer of a pool."""

    def __init__(self, connection: Connection, subjects: Subjects, role: str) -> None:
        self.connection = connection
        self._prefix, self._consumer = f"{subjects.prefix}.", (subjects.table_stream, role)
        # Requests to the pool of rollouts name its group; see `broker.streams.pool_spec`.
        backlog = (lambda: 0) if role == "rollout" else None
        self._pull = PullSubscription(connection, subjects.table_stream, role, 64, prefetch=False, backlog=backlog)
        connection.call(self._pull.start(), 10)

    def take(self, number: int, seconds: float = 10.0) -> dict[str, Msg]:
        """Take messages, by `<row>.<column>`; fewer if no new ones come for some seconds."""
        found: dict[str, Msg] = {}
        end = time.monotonic() + seconds
        while len(found) < number and (left := end - time.monotonic()) > 0:
            messages = self.connection.call(self._pull.fetch(number - len(found), left), left + 5)
            taken = {message.subject.removeprefix(self._prefix): message for message in messages}
            if not taken.keys() <= found.keys():
                end = time.monotonic() + seconds
            found |= taken
        return found

    def take_all(self, number: int) -> dict[str, Msg]:
        """Take the messages that there should be, and any others that the consumer has or has sent."""
        taken = self.take(number)
        # The answer follows the messages that the server has sent before.
        info = self.connection.call(self.connection.js.consumer_info(*self._consumer), 10)
        return taken | self.take(len(self._pull.buffered) + (info.num_pending or 0))

    def acknowledge(self, *messages: Msg) -> None:
        for message in messages:
            self.connection.call(message.ack_sync(), 10)

    def answer(self, message: Msg, body: bytes) -> None:
        """Answer a delivery."""

        async def publish() -> None:
            await self.connection.nc.publish(message.reply, body)
            await self.connection.nc.flush(5)

        self.connection.call(publish(), 10)


@contextmanager
def pool_client(guarded: Guarded, subjects: Subjects, role: str, user: str = "") -> Iterator[PoolClient]:
    """A client of a role's pool, with the credentials of the role or of another user."""
    name = user or role
    with closing(Connection(guarded.address(name), name)) as connection:
        yield PoolClient(connection, subjects, role)
