"""Consumers of the table on a real server: redelivery, credit, and lost connections."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from broker.codec import encode
from broker.connection import Connection
from broker.leases import Failures, RunState
from broker.ordered_consumer import OrderedConsumer
from broker.pull import Delivery, PullSubscription, nak_deliveries
from broker.server import Server
from broker.store import Store
from broker.streams import ensure_bucket, ensure_consumer, ensure_streams, pool_spec, table_spec
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.messages import Dropped
from relax_actors.roles import table_kinds
from tests.integration.test_table import ROW
from tests.support.running import wait_until


def test_ordered_consumer_continues_after_its_consumer_is_deleted(table: Table) -> None:
    connection, subjects = table.connection, table.subjects

    async def work() -> list[int]:
        consumer = OrderedConsumer(connection, subjects.table_stream, [subjects.column("dropped")], credit=4)
        seen: list[int] = []
        deleted = ""
        async for batch in consumer.batches(tick=0.2):
            seen += [subjects.parse(m.subject).index for m in batch]
            if 2 <= len(seen) <= 12 and deleted != consumer._consumer:
                deleted = consumer._consumer
                await connection.js.delete_consumer(subjects.table_stream, consumer._consumer)
            if len(seen) >= 20:
                return seen
        return seen

    table.put_all((table.subject(RowId(0, i), "dropped"), Dropped("x", "")) for i in range(4))
    future = connection.submit(work())
    for i in range(4, 20):
        table.put(table.subject(RowId(0, i), "dropped"), Dropped("x", ""))
    seen = future.result(30)
    assert sorted(seen[:4]) == [0, 1, 2, 3]
    assert seen[4:] == list(range(4, 20))


def test_reader_of_subjects_without_a_message_learns_it_at_once(table: Table) -> None:
    async def work() -> tuple[int, bool, list[int]]:
        consumer = OrderedConsumer(table.connection, table.subjects.table_stream, [table.subjects.column("dropped")])
        batches = consumer.batches(tick=600)
        empty, drained = await anext(batches), consumer.drained
        await table.put_async(table.subject(RowId(0, 7), "dropped"), encode(Dropped("x", ""), "test.0#1"))
        first = await anext(batches)
        await consumer.close()
        return len(empty), drained, [table.subjects.parse(message.subject).index for message in first]

    assert table.connection.call(work(), 60) == (0, True, [7])
    assert table.snapshot([table.subjects.column("quarantined")], caught_up=True) == []


def test_pool_redelivers_unacknowledged_messages(table: Table) -> None:
    connection, subjects = table.connection, table.subjects
    table.put_all((table.subject(RowId(0, i), "dropped"), Dropped("x", "")) for i in range(10))

    async def work() -> tuple[set[str], set[str]]:
        await ensure_consumer(
            connection, subjects.table_stream, pool_spec("pool", [subjects.column("dropped")], 1.0, 100)
        )
        first = PullSubscription(connection, subjects.table_stream, "pool", 16)
        await first.start()
        lost: set[str] = set()
        while len(lost) < 10:
            lost |= {m.subject for m in await first.fetch(16, 5)}
        await first.close()
        second = PullSubscription(connection, subjects.table_stream, "pool", 16)
        await second.start()
        again: set[str] = set()
        while len(again) < 10:
            for message in await second.fetch(3, 5):
                assert message.metadata.num_delivered == 2
                await message.ack_sync()
                again.add(message.subject)
        return lost, again

    lost, again = connection.call(work(), 20)
    assert lost == again


def test_subscription_without_prefetch_leaves_messages_to_others(table: Table) -> None:
    connection, subjects = table.connection, table.subjects
    table.put_all((table.subject(RowId(0, i), "dropped"), Dropped("x", "")) for i in range(10))

    async def work() -> tuple[int, int]:
        spec = pool_spec("pool", [subjects.column("dropped")], 3600.0, 100)
        await ensure_consumer(connection, subjects.table_stream, spec)
        first = PullSubscription(connection, subjects.table_stream, "pool", 2, prefetch=False)
        await first.start()
        mine = len(await first.fetch(2, 5, 5))
        second = PullSubscription(connection, subjects.table_stream, "pool", 16)
        await second.start()
        others = 0
        while mine + others < 10 and (more := len(await second.fetch(16, 5))):
            others += more
        return mine, others

    assert connection.call(work(), 30) == (2, 8)


def test_nak_redelivers_unacknowledged_messages_of_a_dead_reader_at_once(table: Table) -> None:
    connection, subjects = table.connection, table.subjects
    table.put_all((table.subject(RowId(0, i), "dropped"), Dropped("x", "")) for i in range(10))
    taken: list[Delivery] = []

    async def work() -> tuple[set[str], dict[str, int]]:
        spec = pool_spec("pool", [subjects.column("dropped")], 3600.0, 100)
        await ensure_consumer(connection, subjects.table_stream, spec)
        first = PullSubscription(connection, subjects.table_stream, "pool", 16, taken.append)
        await first.start()
        lost: set[str] = set()
        while len(lost) < 7:
            for message in await first.fetch(1, 5):
                if len(taken) > 3 and message.metadata.sequence and message.metadata.sequence.stream <= 3:
                    await message.ack_sync()
                else:
                    lost.add(message.subject)
        await first.close()
        await nak_deliveries(connection, subjects.table_stream, "pool", taken)
        second = PullSubscription(connection, subjects.table_stream, "pool", 16)
        await second.start()
        again: dict[str, int] = {}
        while messages := await second.fetch(16, 5 if len(again) < 7 else 0.5):
            again |= {m.subject: m.metadata.num_delivered or 0 for m in messages}
        return lost, again

    lost, again = connection.call(work(), 30)
    assert len(taken) == 10
    assert again == dict.fromkeys(lost, 2)


def test_failure_counts_of_purged_rows_are_forgotten(table: Table) -> None:
    kept, gone = RowId(7, 1), RowId(6, 1)

    async def work() -> tuple[Failures, Failures, int, int]:
        state = RunState(table.connection, await ensure_bucket(table.connection, table.subjects))
        for row in (kept, gone, gone):
            await state.count_failure("reward", row, "error", "trace")
        await state.forget_failures(lambda row: row.step < 7)
        found = await state.failures("reward", gone), await state.failures("reward", kept)
        return *found, await state.count_failure("reward", gone, "", ""), await state.next_incarnation("reward", 0)

    none, one, restarted, incarnation = table.connection.call(work(), 20)
    assert (none.count, one.count) == (0, 1)
    assert (restarted, incarnation) == (1, 1)


def test_subscription_closed_while_disconnected_is_not_restored(tmp_path: Path) -> None:
    server = Server(tmp_path / "broker")
    connection = Connection(server.start(), "test")

    async def subscriptions(*, close: PullSubscription | None = None) -> tuple[PullSubscription, int]:
        pull = close or PullSubscription(connection, "S", "c", 4)
        await (pull.close() if close else pull.start())
        return pull, len(connection.nc._subs)

    try:
        pull, before = connection.call(subscriptions(), 5)
        assert server.process is not None
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        wait_until(lambda: not connection.nc.is_connected, "loss of the connection")
        assert connection.call(subscriptions(close=pull), 5)[1] == before - 1
    finally:
        connection.close()
        server.stop()


def test_waiting_fetch_repeats_its_request_after_a_reconnect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.pull.EXPIRES", 600.0)
    server = Server(tmp_path / "broker")
    connection = Connection(server.start(), "test")
    subjects = Subjects("r")
    connection.call(ensure_streams(connection, [table_spec(subjects, table_kinds(), 1 << 20)]), 20)
    table = Table(connection, subjects, Store(tmp_path / "store"), "test.0#1")

    async def subscribe() -> PullSubscription:
        await ensure_consumer(
            connection, subjects.table_stream, pool_spec("pool", [subjects.column("dropped")], 600.0, 100)
        )
        pull = PullSubscription(connection, subjects.table_stream, "pool", 16)
        await pull.start()
        assert await pull.fetch(1, 0.1) == []
        return pull

    try:
        waiting = connection.submit(connection.call(subscribe(), 10).fetch(1, 30))
        assert server.process is not None
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        server = Server(tmp_path / "broker")
        server.start()
        table.put(table.subject(ROW, "dropped"), Dropped("x", ""))
        assert [m.subject for m in waiting.result(10)] == [table.subject(ROW, "dropped")]
    finally:
        connection.close()
        server.stop()


@pytest.mark.slow
def test_subscription_stays_within_its_credit_after_lost_connections(
    connection: Connection, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.pull.EXPIRES", 0.4)
    monkeypatch.setattr("broker.pull.IDLE_EXPIRES", 1.2)
    subjects, column = table.subjects, table.subjects.column("dropped")

    async def subscribe() -> PullSubscription:
        await ensure_consumer(connection, subjects.table_stream, pool_spec("pool", [column], 600.0, 100))
        pull = PullSubscription(connection, subjects.table_stream, "pool", 4, prefetch=False)
        await pull.start()
        assert await pull.fetch(1, 1.5) == []  # until requests reach their longest expiry
        for _ in range(2):
            await pull._on_reconnect()
            assert await pull.fetch(1, 0.1) == []
        assert await pull.fetch(1, 1.8) == []  # the requests from before the reconnects have expired
        return pull

    async def take(pull: PullSubscription) -> int:
        first = await pull.fetch(1, 5)
        await asyncio.sleep(0.5)
        return len(first) + len(pull.buffered)

    pull = connection.call(subscribe(), 30)
    table.put_all((table.subject(RowId(0, i), "dropped"), Dropped("x", "")) for i in range(30))
    assert connection.call(take(pull), 10) == 4
