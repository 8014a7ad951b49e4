"""The table on a real server: write-once, look-ups, followers, purge, kill -9."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest

from broker.connection import Address, Bridge
from broker.errors import BrokerError, BrokerUnreachableError
from broker.leases import Failures, RunState
from broker.pull import Delivery, Follower, StandingPull, give_back
from broker.server import Server, ServerSettings
from broker.store import Store
from broker.streams import ensure_bucket, ensure_consumer, ensure_streams, pool_spec, table_spec
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.messages import Dropped, Reward
from tests.support.running import wait_until

ROW = RowId(3, 4)


def test_second_write_of_a_cell_is_refused_and_changes_nothing(table: Table) -> None:
    subject = table.cell(ROW, "dropped")
    assert table.put(subject, Dropped("no_signal", "first"))
    assert not table.put(subject, Dropped("no_signal", "second"))
    assert table.fetch(subject, Dropped) == Dropped("no_signal", "first")


def test_many_writers_of_one_cell_have_one_winner(table: Table) -> None:
    subject = table.cell(ROW, "dropped")
    assert sum(table.put_all((subject, Dropped("x", str(i))) for i in range(50))) == 1


def test_a_cell_that_another_stream_takes_is_an_error(bridge: Bridge, subjects: Subjects, tmp_path: Path) -> None:
    stranger = f"OF_{subjects.run}"
    bridge.call(bridge.js.add_stream(name=stranger, subjects=[f"{subjects.prefix}.group.>"]), 10)
    orphan = Table(bridge, subjects, Store(tmp_path / "store"), "test.0#1")
    with pytest.raises(BrokerError, match=f"went to stream {stranger}, which is not this run's"):
        orphan.put(orphan.cell(ROW, "dropped"), Dropped("x", ""))
    bridge.call(bridge.js.delete_stream(stranger), 10)


def test_cell_that_is_not_there_is_none(table: Table) -> None:
    assert table.get(table.cell(ROW, "reward")) is None


def test_large_arrays_go_through_the_store_and_come_back_equal(table: Table) -> None:
    values = np.arange(100_000, dtype=np.float32)
    subject = table.cell(ROW, "reward")
    table.put(subject, Reward(values))
    cell = table.get(subject)
    assert cell is not None
    assert len(cell.data) < 1000
    np.testing.assert_array_equal(table.read(cell.data, Reward).values, values)


def test_snapshot_gives_cells_in_the_order_written(table: Table) -> None:
    for index in (5, 1, 3):
        table.put(table.cell(RowId(0, index), "dropped"), Dropped("x", ""))
    table.put(table.cell(RowId(0, 9), "reward"), Reward(np.zeros(1, np.float32)))
    found = table.snapshot([table.subjects.column("dropped")])
    assert [cell_id.index for cell_id, _ in found] == [5, 1, 3]


def test_snapshot_of_an_empty_table_is_empty(table: Table) -> None:
    assert table.snapshot([table.subjects.column("dropped")]) == []


@pytest.mark.slow
def test_more_cells_are_listed_than_the_server_names_at_once(table: Table) -> None:
    data = table.encode(table.cell(ROW, "dropped"), Dropped("x", ""))
    wanted = 100_001

    async def write() -> None:
        for start in range(0, wanted, 5_000):
            subjects = [table.cell(RowId(0, i), "dropped") for i in range(start, min(wanted, start + 5_000))]
            await asyncio.gather(*[await table.bridge.js.publish_async(subject, data) for subject in subjects])

    table.bridge.call(write(), 100)
    assert table.count(table.subjects.column("dropped")) == wanted


def test_purge_removes_the_rows_of_a_step_only(table: Table) -> None:
    for step in (1, 2):
        table.put(table.cell(RowId(step, 0), "dropped"), Dropped("x", ""))
    table.purge([f"{table.subjects.prefix}.group.1.>"])
    assert [c.step for c, _ in table.snapshot([table.subjects.column("dropped")])] == [2]


def test_follower_goes_on_where_it_was_after_its_consumer_is_lost(table: Table) -> None:
    bridge, subjects = table.bridge, table.subjects

    async def work() -> list[int]:
        follower = Follower(bridge, subjects.table_stream, [subjects.column("dropped")], credit=4)
        seen: list[int] = []
        deleted = ""
        async for batch in follower.batches(tick=0.2):
            seen += [subjects.parse(m.subject).index for m in batch]
            if 2 <= len(seen) <= 12 and deleted != follower._consumer:
                deleted = follower._consumer
                await bridge.js.delete_consumer(subjects.table_stream, follower._consumer)
            if len(seen) >= 20:
                return seen
        return seen

    table.put_all((table.cell(RowId(0, i), "dropped"), Dropped("x", "")) for i in range(4))
    future = bridge.submit(work())
    for i in range(4, 20):
        table.put(table.cell(RowId(0, i), "dropped"), Dropped("x", ""))
    seen = future.result(30)
    assert sorted(seen[:4]) == [0, 1, 2, 3]
    assert seen[4:] == list(range(4, 20))


def test_pool_redelivers_what_an_actor_did_not_acknowledge(table: Table) -> None:
    bridge, subjects = table.bridge, table.subjects
    table.put_all((table.cell(RowId(0, i), "dropped"), Dropped("x", "")) for i in range(10))

    async def work() -> tuple[set[str], set[str]]:
        await ensure_consumer(bridge, subjects.table_stream, pool_spec("pool", [subjects.column("dropped")], 1.0, 100))
        first = StandingPull(bridge, subjects.table_stream, "pool", 16)
        await first.start()
        lost: set[str] = set()
        while len(lost) < 10:
            lost |= {m.subject for m in await first.next(16, 5)}
        await first.close()
        second = StandingPull(bridge, subjects.table_stream, "pool", 16)
        await second.start()
        again: set[str] = set()
        while len(again) < 10:
            for message in await second.next(3, 5):
                assert message.metadata.num_delivered == 2
                await message.ack_sync()
                again.add(message.subject)
        return lost, again

    lost, again = bridge.call(work(), 20)
    assert lost == again


def test_a_reader_that_takes_nothing_ahead_leaves_the_rest_to_another(table: Table) -> None:
    bridge, subjects = table.bridge, table.subjects
    table.put_all((table.cell(RowId(0, i), "dropped"), Dropped("x", "")) for i in range(10))

    async def work() -> tuple[int, int]:
        spec = pool_spec("pool", [subjects.column("dropped")], 3600.0, 100)
        await ensure_consumer(bridge, subjects.table_stream, spec)
        first = StandingPull(bridge, subjects.table_stream, "pool", 2, ahead=False)
        await first.start()
        mine = len(await first.next(2, 5, 5))
        second = StandingPull(bridge, subjects.table_stream, "pool", 16)
        await second.start()
        others = 0
        while mine + others < 10 and (more := len(await second.next(16, 5))):
            others += more
        return mine, others

    assert bridge.call(work(), 30) == (2, 8)


def test_what_a_dead_reader_had_taken_comes_again_at_once_but_not_what_it_acknowledged(table: Table) -> None:
    bridge, subjects = table.bridge, table.subjects
    table.put_all((table.cell(RowId(0, i), "dropped"), Dropped("x", "")) for i in range(10))
    taken: list[Delivery] = []

    async def work() -> tuple[set[str], dict[str, int]]:
        spec = pool_spec("pool", [subjects.column("dropped")], 3600.0, 100)
        await ensure_consumer(bridge, subjects.table_stream, spec)
        first = StandingPull(bridge, subjects.table_stream, "pool", 16, taken.append)
        await first.start()
        lost: set[str] = set()
        while len(lost) < 7:
            for message in await first.next(1, 5):
                if len(taken) > 3 and message.metadata.sequence and message.metadata.sequence.stream <= 3:
                    await message.ack_sync()
                else:
                    lost.add(message.subject)
        await first.close()
        await give_back(bridge, subjects.table_stream, "pool", taken)
        second = StandingPull(bridge, subjects.table_stream, "pool", 16)
        await second.start()
        again: dict[str, int] = {}
        while messages := await second.next(16, 5 if len(again) < 7 else 0.5):
            again |= {m.subject: m.metadata.num_delivered or 0 for m in messages}
        return lost, again

    lost, again = bridge.call(work(), 30)
    assert len(taken) == 10
    assert again == dict.fromkeys(lost, 2)


def test_counts_of_failures_of_rows_that_are_gone_are_forgotten(table: Table) -> None:
    kept, gone = RowId(7, 1), RowId(6, 1)

    async def work() -> tuple[Failures, Failures, int, int]:
        state = RunState(table.bridge, await ensure_bucket(table.bridge, table.subjects))
        for row in (kept, gone, gone):
            await state.count_failure("reward", row, "error", "trace")
        await state.forget_failures(lambda row: row.step < 7)
        found = await state.failures("reward", gone), await state.failures("reward", kept)
        return *found, await state.count_failure("reward", gone, "", ""), await state.next_incarnation("reward", 0)

    none, one, anew, incarnation = table.bridge.call(work(), 20)
    assert (none.count, one.count) == (0, 1)
    assert (anew, incarnation) == (1, 1)


def test_incarnations_are_counted_across_connections(table: Table) -> None:
    async def work() -> list[int]:
        state = RunState(table.bridge, await ensure_bucket(table.bridge, table.subjects))
        return [await state.next_incarnation("trainer", 0) for _ in range(3)]

    assert table.bridge.call(work(), 20) == [1, 2, 3]
    assert table.bridge.call(work(), 20) == [4, 5, 6]


def test_lease_vanishes_when_it_is_not_renewed(table: Table) -> None:
    state = RunState(table.bridge, table.bridge.call(ensure_bucket(table.bridge, table.subjects), 20))
    table.bridge.call(state.renew_lease("reward", 0, {"pid": 1}, ttl=1), 10)
    assert "reward.0" in table.bridge.call(state.leases(), 10)
    wait_until(lambda: "reward.0" not in table.bridge.call(state.leases(), 10), "end of the lease")


def test_cells_and_credentials_survive_kill_of_the_server(tmp_path: Path) -> None:
    server = Server(tmp_path / "broker")
    address = server.start()
    bridge = Bridge(address, "test")
    subjects = Subjects("killed")
    bridge.call(ensure_streams(bridge, [table_spec(subjects, 1 << 26)]), 20)
    table = Table(bridge, subjects, Store(tmp_path / "store"), "test.0#1")
    try:
        for i in range(20):
            table.put(table.cell(RowId(0, i), "dropped"), Dropped("x", ""))
        assert server.process is not None
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        again = Server(tmp_path / "broker")
        assert again.start() == address
        server = again
        assert not table.put(table.cell(RowId(0, 3), "dropped"), Dropped("y", ""))
        assert len(table.snapshot([subjects.column("dropped")])) == 20
    finally:
        bridge.close()
        server.stop()


def test_a_pull_that_ends_while_the_server_is_away_leaves_no_subscription(tmp_path: Path) -> None:
    server = Server(tmp_path / "broker")
    bridge = Bridge(server.start(), "test")

    async def subscriptions(*, close: StandingPull | None = None) -> tuple[StandingPull, int]:
        pull = close or StandingPull(bridge, "S", "c", 4)
        await (pull.close() if close else pull.start())
        return pull, len(bridge.nc._subs)

    try:
        pull, before = bridge.call(subscriptions(), 5)
        assert server.process is not None
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        wait_until(lambda: not bridge.nc.is_connected, "loss of the connection")
        assert bridge.call(subscriptions(close=pull), 5)[1] == before - 1
    finally:
        bridge.close()
        server.stop()


def test_a_pull_that_waits_asks_again_at_once_when_the_server_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.pull.EXPIRES", 600.0)
    server = Server(tmp_path / "broker")
    bridge = Bridge(server.start(), "test")
    subjects = Subjects("r")
    bridge.call(ensure_streams(bridge, [table_spec(subjects, 1 << 20)]), 20)
    table = Table(bridge, subjects, Store(tmp_path / "store"), "test.0#1")

    async def ask() -> StandingPull:
        await ensure_consumer(
            bridge, subjects.table_stream, pool_spec("pool", [subjects.column("dropped")], 600.0, 100)
        )
        pull = StandingPull(bridge, subjects.table_stream, "pool", 16)
        await pull.start()
        assert await pull.next(1, 0.1) == []
        return pull

    try:
        waiting = bridge.submit(bridge.call(ask(), 10).next(1, 30))
        assert server.process is not None
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        server = Server(tmp_path / "broker")
        server.start()
        table.put(table.cell(ROW, "dropped"), Dropped("x", ""))
        assert [m.subject for m in waiting.result(10)] == [table.cell(ROW, "dropped")]
    finally:
        bridge.close()
        server.stop()


def test_after_lost_connections_a_reader_has_no_more_in_hand_than_its_credit(
    bridge: Bridge, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.pull.EXPIRES", 0.4)
    monkeypatch.setattr("broker.pull.IDLE_EXPIRES", 1.2)
    subjects, column = table.subjects, table.subjects.column("dropped")

    async def ask() -> StandingPull:
        await ensure_consumer(bridge, subjects.table_stream, pool_spec("pool", [column], 600.0, 100))
        pull = StandingPull(bridge, subjects.table_stream, "pool", 4, ahead=False)
        await pull.start()
        assert await pull.next(1, 1.5) == []  # until requests live for long
        for _ in range(2):
            await pull._on_reconnect()
            assert await pull.next(1, 0.1) == []
        assert await pull.next(1, 1.8) == []  # those from before have ended
        return pull

    async def take(pull: StandingPull) -> int:
        first = await pull.next(1, 5)
        await asyncio.sleep(0.5)
        return len(first) + len(pull.waiting)

    pull = bridge.call(ask(), 30)
    table.put_all((table.cell(RowId(0, i), "dropped"), Dropped("x", "")) for i in range(30))
    assert bridge.call(take(pull), 10) == 4


def test_port_in_use_is_named_with_the_remedy(address: Address, tmp_path: Path) -> None:
    port = int(address.url.rsplit(":", 1)[1])
    with pytest.raises(BrokerError, match=rf"port {port} is in use; set broker.port"):
        Server(tmp_path / "other", ServerSettings(port=port)).start()


def test_broker_that_does_not_answer_is_named_with_the_remedy() -> None:
    with pytest.raises(BrokerUnreachableError, match=r"nats://127\.0\.0\.1:1 does not answer .* set broker\.url"):
        Bridge(Address("nats://127.0.0.1:1"), "test", deadline=0.5)


def test_full_table_is_a_clear_error_and_not_taken_for_a_second_write(bridge: Bridge, tmp_path: Path) -> None:
    subjects = Subjects("full")
    bridge.call(ensure_streams(bridge, [table_spec(subjects, 2000)]), 20)
    table = Table(bridge, subjects, Store(tmp_path), "test.0#1")
    table.patience = 0.5
    with pytest.raises(BrokerError, match=r"cannot store .* raise broker\.max_bytes"):
        for i in range(100):
            table.put(table.cell(RowId(0, i), "dropped"), Dropped("x", "y" * 50))
