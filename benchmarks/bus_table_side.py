"""The table's producer and consumer for `bus.py`: `python bus_table_side.py put|get WORKLOAD`."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bus_workload import Workload, arguments, check, serve
from nats.aio.msg import Msg

from broker.address import Address
from broker.codec import Array, Resolver
from broker.connection import Connection
from broker.permissions import Permissions, allow_pool_consumer, allow_removal, inbox_prefix
from broker.pull import PullSubscription
from broker.server import Server
from broker.server_keys import Users
from broker.store import Store
from broker.streams import ensure_consumer, ensure_streams, pool_spec, table_spec
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.roles import table_kinds

COLUMN, PRODUCER, POOL = "trajectory", "rollout", "trainer"
SUBJECTS = Subjects("bench")
WINDOW = 2
"""Batches that may wait for their acknowledgement while the next one is processed."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Cell of one group: arrays `[group, length]`."""

    prompt: Array
    response: Array
    logprobs: Array


def start_server(folder: Path) -> Server:
    """Start a server with a table and a consumer, and an account for each side, as a run has."""
    table = SUBJECTS.table_stream
    granted = {
        PRODUCER: Permissions((SUBJECTS.column(COLUMN),)),
        POOL: allow_pool_consumer(table, POOL) | allow_removal(table),
    }
    inboxes = {user: Permissions((), (f"{inbox_prefix(SUBJECTS.run, user)}.>",)) for user in granted}
    users = {user: permitted | inboxes[user] for user, permitted in granted.items()}
    server = Server(folder / "broker", users=Users(SUBJECTS.run, users | Users.operator(SUBJECTS.run).granted))
    connection = Connection(server.start(), "bench")
    connection.call(ensure_streams(connection, [table_spec(SUBJECTS, table_kinds(), 2 << 30)]), 20)
    spec = pool_spec(POOL, [SUBJECTS.column(COLUMN)], 30.0, 1024)
    connection.call(ensure_consumer(connection, table, spec), 20)
    connection.close()
    return server


def open_table(work: Workload, user: str) -> Table:
    """Connect like an actor."""
    folder = Path(work.place)
    connection = Connection(Address.load(folder / "broker" / "address.json").for_user(user), user)
    return Table(connection, SUBJECTS, Store(folder / "store"), f"{user}.0#1")


class Producer:
    """Writes a batch as one cell per group, and encodes the next batch while the broker acknowledges it."""

    def __init__(self, work: Workload) -> None:
        self.work, self.table = work, open_table(work, PRODUCER)

    def put(self, first: int, count: int) -> None:
        """Write batches; return when the last one is acknowledged."""
        pending: deque[Future[list[bool]]] = deque()
        for number in range(first, first + count):
            pending.append(self.table.connection.submit(self.table.put_encoded_async(self._encoded(number))))
            if len(pending) > WINDOW:
                self._wait_for(pending.popleft())
        while pending:
            self._wait_for(pending.popleft())

    def _encoded(self, number: int) -> list[tuple[str, bytes]]:
        arrays, size = self.work.batch(number), self.work.group
        cells = []
        for index in range(self.work.samples // size):
            group = Samples(**{name: array[index * size : (index + 1) * size] for name, array in arrays.items()})
            cells.append((self.table.subject(RowId(number, index), COLUMN), group))
        encoded = self.table.encode_all(cells)
        return [(subject, data) for (subject, _), data in zip(cells, encoded, strict=True)]

    @staticmethod
    def _wait_for(written: Future[list[bool]]) -> None:
        if not all(written.result(60)):
            msg = "a batch was written before"
            raise RuntimeError(msg)


class Consumer:
    """Takes cells like a pool actor, reads every byte, acknowledges, and purges complete batches."""

    def __init__(self, work: Workload) -> None:
        self.work, self.table = work, open_table(work, POOL)
        connection, credit = self.table.connection, 4 * work.samples // work.group
        self.pull = PullSubscription(connection, SUBJECTS.table_stream, POOL, credit)
        connection.call(self.pull.start(), 10)

    def get(self, _first: int, count: int) -> None:
        """Take `count` batches in any order; return when all are purged."""
        groups = self.work.samples // self.work.group
        totals: dict[int, list[float]] = {}
        pending: deque[Future[None]] = deque()
        seen = 0
        while seen < count * groups:
            messages = self.table.connection.call(self.pull.fetch(groups, 60.0), 70)
            if not messages:
                msg = f"{seen} of {count * groups} cells arrived within a minute"
                raise RuntimeError(msg)
            resolve = self.table.store.reader()
            for message in messages:
                number = self.table.subjects.parse(message.subject).step
                totals.setdefault(number, []).append(self._touch(message, resolve))
            seen += len(messages)
            done = [number for number, parts in totals.items() if len(parts) == groups]
            for number in done:
                check(self.work, number, sum(totals.pop(number)))
                self.table.store.remove_later(f"group/{number}")
            pending.append(self.table.connection.submit(self._release(messages, done)))
            if len(pending) > WINDOW:
                pending.popleft().result(60)
        while pending:
            pending.popleft().result(60)
        self.table.store.close()

    def _touch(self, message: Msg, resolve: Resolver) -> float:
        cell = self.table.read(message.data, Samples, resolve=resolve)
        return float(sum(np.sum(array, dtype=np.float64) for array in (cell.prompt, cell.response, cell.logprobs)))

    async def _release(self, messages: list[Msg], done: list[int]) -> None:
        table = self.table
        purges = (
            table.connection.js.purge_stream(
                table.subjects.table_stream, subject=f"{table.subjects.prefix}.group.{n}.>"
            )
            for n in done
        )
        await asyncio.gather(*(message.ack() for message in messages))
        await asyncio.gather(*purges)


if __name__ == "__main__":
    role, workload = arguments()
    if role == "put":
        serve({"put": Producer(workload).put})
    else:
        serve({"get": Consumer(workload).get})
