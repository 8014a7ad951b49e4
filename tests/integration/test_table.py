"""The table on a real server: write-once cells, look-ups, consumers, purge and kill -9."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.address import Address
from broker.connection import Connection
from broker.errors import BrokerError, BrokerUnreachableError
from broker.leases import LARGE_BYTES, RunState
from broker.server import Server, ServerSettings
from broker.store import Store
from broker.streams import ensure_bucket, ensure_streams, table_spec
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.messages import Dropped, Reward
from relax_actors.roles import table_kinds
from relax_actors.training.strays import allowed_bytes
from tests.support.messages import assert_says
from tests.support.running import wait_until

ROW = RowId(3, 4)


def test_second_write_of_a_cell_is_refused_and_changes_nothing(table: Table) -> None:
    subject = table.subject(ROW, "dropped")
    assert table.put(subject, Dropped("no_signal", "first"))
    assert not table.put(subject, Dropped("no_signal", "second"))
    assert table.fetch(subject, Dropped) == Dropped("no_signal", "first")


def test_many_writers_of_one_cell_have_one_winner(table: Table) -> None:
    subject = table.subject(ROW, "dropped")
    assert sum(table.put_all((subject, Dropped("x", str(i))) for i in range(50))) == 1


def test_cell_accepted_by_another_stream_is_an_error(
    connection: Connection, subjects: Subjects, tmp_path: Path
) -> None:
    stranger = f"OF_{subjects.run}"
    connection.call(connection.js.add_stream(name=stranger, subjects=[f"{subjects.prefix}.group.>"]), 10)
    orphan = Table(connection, subjects, Store(tmp_path / "store"), "test.0#1")
    with pytest.raises(BrokerError, match=f"stream {stranger}, .*not this run's"):
        orphan.put(orphan.subject(ROW, "dropped"), Dropped("x", ""))
    connection.call(connection.js.delete_stream(stranger), 10)


def test_table_of_an_earlier_cell_schema_is_refused(table: Table) -> None:
    table.put(table.subject(ROW, "dropped"), Dropped("x", ""))
    spec = table_spec(table.subjects, table_kinds(), 1 << 20)
    table.connection.call(ensure_streams(table.connection, [spec]), 30)
    old = replace(spec, description=None)
    table.connection.call(table.connection.js.update_stream(old), 10)
    with pytest.raises(BrokerError, match=r"schema 1.* reads cell schema 3"):
        table.connection.call(ensure_streams(table.connection, [spec]), 30)


def test_missing_cell_is_none(table: Table) -> None:
    assert table.get(table.subject(ROW, "reward")) is None


def test_large_arrays_round_trip_through_the_store(table: Table) -> None:
    values = np.arange(100_000, dtype=np.float32)
    subject = table.subject(ROW, "reward")
    table.put(subject, Reward(values))
    cell = table.get(subject)
    assert cell is not None
    assert len(cell.data) < 1000
    np.testing.assert_array_equal(table.read(cell.data, Reward).values, values)


def test_snapshot_returns_cells_in_the_order_written(table: Table) -> None:
    for index in (5, 1, 3):
        table.put(table.subject(RowId(0, index), "dropped"), Dropped("x", ""))
    table.put(table.subject(RowId(0, 9), "reward"), Reward(np.zeros(1, np.float32)))
    found = table.snapshot([table.subjects.column("dropped")])
    assert [cell_id.index for cell_id, _ in found] == [5, 1, 3]


def test_snapshot_of_an_empty_table_is_empty(table: Table) -> None:
    assert table.snapshot([table.subjects.column("dropped")]) == []


@pytest.mark.slow
def test_listing_reads_all_pages_of_subjects(table: Table) -> None:
    data = table.encode(table.subject(ROW, "dropped"), Dropped("x", ""))
    wanted = 100_001

    async def write() -> None:
        for start in range(0, wanted, 5_000):
            subjects = [table.subject(RowId(0, i), "dropped") for i in range(start, min(wanted, start + 5_000))]
            await asyncio.gather(*[await table.connection.js.publish_async(subject, data) for subject in subjects])

    table.connection.call(write(), 100)
    assert table.count_cells(table.subjects.column("dropped")) == wanted


def test_purge_removes_only_the_rows_of_a_step(table: Table) -> None:
    for step in (1, 2):
        table.put(table.subject(RowId(step, 0), "dropped"), Dropped("x", ""))
    table.purge([f"{table.subjects.prefix}.group.1.>"])
    assert [c.step for c, _ in table.snapshot([table.subjects.column("dropped")])] == [2]


def test_bucket_with_many_failures_is_swept_and_keeps_the_settings_of_the_run(table: Table) -> None:
    """The settings are stored under `run`, a key of one part."""

    async def work() -> tuple[int, Any, int]:
        state = RunState(table.connection, await ensure_bucket(table.connection, table.subjects))
        await state.put("run", {"version": 1})
        rows = [RowId(0, index) for index in range(LARGE_BYTES // 8000 + 1)]
        for start in range(0, len(rows), 64):
            counts = (state.count_failure("reward", row, "error", "t" * 8000) for row in rows[start : start + 64])
            await asyncio.gather(*counts)
        removed = await state.enforce(lambda key: allowed_bytes(key, ["reward"]))
        return removed, await state.get("run"), (await state.failures("reward", rows[0])).count

    assert table.connection.call(work(), 60) == (0, {"version": 1}, 1)


def test_incarnation_numbers_never_repeat(table: Table) -> None:
    async def work() -> list[int]:
        state = RunState(table.connection, await ensure_bucket(table.connection, table.subjects))
        return [await state.next_incarnation("trainer", 0) for _ in range(3)]

    assert table.connection.call(work(), 20) == [1, 2, 3]
    assert table.connection.call(work(), 20) == [4, 5, 6]


def test_lease_expires_if_it_is_not_renewed(table: Table) -> None:
    state = RunState(table.connection, table.connection.call(ensure_bucket(table.connection, table.subjects), 20))
    table.connection.call(state.renew_lease("root", 0, {"pid": 1, "since": 0.0, "children": {}}, ttl=1), 10)
    assert "root.0" in table.connection.call(state.leases(), 10)
    wait_until(lambda: "root.0" not in table.connection.call(state.leases(), 10), "end of the lease")


def test_cells_and_credentials_survive_a_killed_server(tmp_path: Path) -> None:
    server = Server(tmp_path / "broker")
    address = server.start()
    connection = Connection(address, "test")
    subjects = Subjects("killed")
    connection.call(ensure_streams(connection, [table_spec(subjects, table_kinds(), 1 << 26)]), 20)
    table = Table(connection, subjects, Store(tmp_path / "store"), "test.0#1")
    try:
        for i in range(20):
            table.put(table.subject(RowId(0, i), "dropped"), Dropped("x", ""))
        assert server.process is not None
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        again = Server(tmp_path / "broker")
        assert again.start() == address
        server = again
        assert not table.put(table.subject(RowId(0, 3), "dropped"), Dropped("y", ""))
        assert len(table.snapshot([subjects.column("dropped")])) == 20
    finally:
        connection.close()
        server.stop()


def test_port_in_use_is_reported_with_the_remedy(address: Address, tmp_path: Path) -> None:
    port = int(address.url.rsplit(":", 1)[1])
    with pytest.raises(BrokerError, match=rf"port {port} is in use; set broker.port"):
        Server(tmp_path / "other", ServerSettings(port=port)).start()


def test_unreachable_broker_is_reported_with_the_remedy() -> None:
    with pytest.raises(BrokerUnreachableError, match=r"127\.0\.0\.1:1 does not answer"):
        Connection(Address("nats://127.0.0.1:1"), "test", deadline=0.5)


def test_full_table_is_an_error_and_not_a_second_write(connection: Connection, tmp_path: Path) -> None:
    subjects = Subjects("full")
    connection.call(ensure_streams(connection, [table_spec(subjects, table_kinds(), 2000)]), 20)
    table = Table(connection, subjects, Store(tmp_path), "test.0#1")
    table.patience = 0.5
    with pytest.raises(BrokerError, match=r"cannot store .* raise broker\.max_bytes"):
        for i in range(100):
            table.put(table.subject(RowId(0, i), "dropped"), Dropped("x", "y" * 50))


def test_streams_whose_signing_keys_are_missing_are_reported(tmp_path: Path) -> None:
    """New keys would make a new account, in which the run would start from nothing."""
    folder = tmp_path / "broker"
    server = Server(folder)
    server.start()
    server.stop()
    (folder / "keys" / "private" / "keys.json").unlink()
    with pytest.raises(BrokerError) as error:
        Server(folder).start()
    assert_says(error.value, f"{folder}/keys/private/keys.json", f"{folder}/store", "--fresh")
