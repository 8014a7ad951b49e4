"""Pump on a real server, with messages as they are redelivered after a crash."""

from __future__ import annotations

import asyncio
import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nats.aio.msg import Msg
from nats.js.api import RawStreamMsg
from nats.js.errors import NotFoundError
from numpy.typing import NDArray

from broker.codec import TensorRef, encode, plain_value
from broker.leases import RunState
from broker.pull import Delivery, PullSubscription, nak_deliveries
from broker.segment import checksum
from broker.streams import ensure_bucket, ensure_consumer, pool_spec
from broker.subjects import RowId
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.errors import ActorError
from relax_actors.messages import Dropped, Prompt, Reward, Trajectory
from relax_actors.runtime import Context, More, Results, Role, Row, check_role
from relax_actors.runtime.blackbox import MAX_DELIVERIES, BlackBox
from relax_actors.runtime.device_lock import DeviceLock
from relax_actors.runtime.handler import Handler, Job
from relax_actors.runtime.join import Join
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.pool_pump import PoolPump
from relax_actors.runtime.run_folder import RunFolder
from tests.support.contexts import MakeContext, create_consumer
from tests.support.pumps import pool_pump
from tests.support.running import TINY, wait_until


class Counts(Role):
    """Counts the tokens of prompts."""

    reads = ("prompt",)
    writes = "count"
    kinds = ("group", "eval")

    def handle(self, row: Row) -> int:
        return len(row.prompt.tokens)


@pytest.fixture
def pump(table: Table, tmp_path: Path) -> Any:
    config = load_config(TINY, [])
    state = RunState(table.connection, table.connection.call(ensure_bucket(table.connection, table.subjects), 20))
    journal = Journal(table.connection, table.subjects, "counts", 0)
    role = Counts()
    role.context = Context(config, RunFolder(tmp_path), "counts", 0, 1, table, state, journal)
    with pool_pump(role, BlackBox(tmp_path / "counts.box"), []) as pump:
        yield pump


async def delivered_again(table: Table) -> list[Msg]:
    """Return the messages of two prompts, each delivered for the second time."""
    stream, connection = table.subjects.table_stream, table.connection
    filters = [table.subjects.column("prompt", kind) for kind in ("group", "eval")]
    await ensure_consumer(connection, stream, pool_spec("counts", filters, 3600.0, 100))
    taken: list[Delivery] = []
    pull = PullSubscription(connection, stream, "counts", 8, taken.append)
    await pull.start()
    while len(taken) < 2:
        await pull.fetch(8, 5)
    await nak_deliveries(connection, stream, "counts", taken)
    found: list[Msg] = []
    while len(found) < 2:
        found += await pull.fetch(8, 5)
    await pull.close()
    return found


@pytest.mark.parametrize("row", [RowId(1, 0), RowId(4, 0, "eval")])
def test_message_redelivered_after_its_row_was_purged_is_not_handled(table: Table, pump: PoolPump, row: RowId) -> None:
    prompt = Prompt("1>", np.array([1], np.int32), "", {}, seed=0, min_version=0)
    living = RowId(9, 0, row.kind)
    table.put_all((table.subject(each, "prompt"), prompt) for each in (row, living))

    again = table.connection.call(delivered_again(table), 20)
    assert [m.metadata.num_delivered for m in again] == [2, 2]
    table.purge([table.subjects.row(row)])

    async def join() -> list[Any]:
        return await asyncio.gather(*map(Join(pump.role, pump.context).join, again))

    jobs = {job.row for job in table.connection.call(join(), 20) if job is not None}
    assert jobs == {living}


@pytest.mark.parametrize("uri", ["../secret", "{outside}", "link/secret"])
def test_reference_out_of_the_store_drops_its_row_and_is_reported(
    table: Table, pump: PoolPump, tmp_path: Path, uri: str
) -> None:
    """The file outside the store matches the reference, and is refused nevertheless."""
    tokens = np.arange(8, dtype=np.int32)
    outside = table.store.root.parent / "secret"
    outside.write_bytes(tokens.tobytes())
    table.store.root.mkdir(exist_ok=True)
    (table.store.root / "link").symlink_to(outside.parent)
    uri = uri.format(outside=outside)

    def elsewhere(array: NDArray[Any]) -> TensorRef:
        return TensorRef(uri, 0, array.nbytes, "int32", array.shape, checksum(array.view(np.uint8)))

    row = RowId(2, 0)
    data = encode(Prompt("1>", tokens, "", {}, seed=0, min_version=0), "stranger.0#1", elsewhere)
    table.put_encoded([(table.subject(row, "prompt"), data)])

    async def handle() -> str:
        stream, connection = table.subjects.table_stream, table.connection
        await ensure_consumer(connection, stream, pool_spec("counts", [table.subjects.column("prompt")], 60.0, 100))
        pull = PullSubscription(connection, stream, "counts", 8)
        await pull.start()
        await pump.handle(await pull.fetch(8, 10))
        await pull.close()

        async def event() -> RawStreamMsg:
            return await connection.js.get_last_msg(
                table.subjects.log_stream, table.subjects.event("counts", 0, "row_dropped")
            )

        for _ in range(100):
            with suppress(NotFoundError):
                return str((await event()).data)
            await asyncio.sleep(0.05)
        return "no event"

    said = table.connection.call(handle(), 30)
    dropped = table.fetch(table.subject(row, "dropped"), Dropped)
    assert dropped is not None
    assert dropped.reason == "lost_segment"
    assert "points outside the store" in dropped.detail
    assert "points outside the store" in said
    assert table.get(table.subject(row, "count")) is None


class Ones(Role):
    """Rewards samples without a look at them."""

    reads = ("trajectory",)
    writes = "reward"

    def handle(self, row: Row) -> Reward:  # noqa: ARG002 it looks at nothing
        return Reward(np.ones(1, np.float32))


def test_row_with_a_lost_segment_is_dropped_though_only_the_check_of_the_result_reads_it(
    table: Table, pump: PoolPump
) -> None:
    total = 1 << 12
    zeros = np.zeros(total, np.int32)
    lengths, floats = np.array([total], np.int32), np.zeros(total, np.float32)
    trajectory = Trajectory(np.array([1], np.int32), lengths, zeros, floats, zeros, ["a"], ["stop"])
    row = RowId(1, 0)
    data = table.encode(table.subject(row, "trajectory"), trajectory)
    table.store.remove("group")
    job = Job(Msg(None, "a"), row, {"trajectory": data})  # type: ignore[arg-type]
    Handler(Ones(), pump.context).run([job], lambda _: [], lambda _: None)
    assert (job.field, job.error) == ("dropped", None)
    assert job.data is not None
    assert table.read(job.data, Dropped).reason == "lost_segment"


class Looks(Counts):
    """Records whether the device is free while it computes."""

    device: Path

    def handle(self, row: Row) -> bool:  # noqa: ARG002 it looks elsewhere
        return is_free(self.device)


def is_free(device: Path) -> bool:
    with device.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_role_computes_only_while_it_holds_the_shared_device(table: Table, pump: PoolPump, tmp_path: Path) -> None:
    device = tmp_path / "0.lock"
    role, row = Looks(), RowId(1, 0)
    role.device = device
    pump.context.device_lock = device_lock = DeviceLock([device], pump.context, 5.0)
    jobs = [Job(Msg(None, "a"), row, {"prompt": b""}) for _ in range(2)]  # type: ignore[arg-type]
    Handler(role, pump.context).run(jobs, lambda _: [], lambda _: None)
    found = [job.data for job in jobs]
    assert [plain_value(table.read_envelope(data)) for data in found if data is not None] == [False, False]
    assert is_free(device)
    device_lock.close()


def test_occupied_device_blames_no_row_and_is_waited_for_once(table: Table, pump: PoolPump, tmp_path: Path) -> None:
    pump.context.device_lock = device_lock = DeviceLock([tmp_path / "0.lock"], pump.context, 0.3)
    other = DeviceLock([tmp_path / "0.lock"], pump.context, 0.3)
    jobs = [Job(Msg(None, "a"), RowId(1, n), {"prompt": b""}) for n in range(3)]  # type: ignore[arg-type]
    with other():
        Handler(pump.role, pump.context).run(jobs, lambda _: [], lambda _: None)
    assert [type(job.error) for job in jobs] == [ActorError] * 3
    assert len({id(job.error) for job in jobs}) == 1
    device_lock.close()
    other.close()


class Overlaps(Role):
    """Ends rows on request, and takes in rows that arrive meanwhile."""

    reads = ("prompt",)
    writes = "count"
    max_concurrent_rows = 3
    prefetch = False

    def __init__(self) -> None:
        self.ended: set[str] = set()
        self.fails = False

    def stream(self, rows: Sequence[Row], more: More) -> Iterator[Results]:
        running = list(rows)
        while running:
            if self.fails:
                msg = f"{len(rows)} rows are too many"
                raise ValueError(msg)
            through = [row for row in running if str(row.id) in self.ended]
            running = [row for row in running if row not in through]
            if through:
                yield [(row, len(row.prompt.tokens)) for row in through]
            running += more(self.max_concurrent_rows - len(running))
            time.sleep(0.01)


@dataclass(frozen=True)
class AtWork:
    """Role that runs in a pump."""

    role: Overlaps
    table: Table
    box: BlackBox

    def ask_for(self, index: int) -> str:
        """Write a row's prompt; return the row."""
        row = RowId(0, index)
        prompt = Prompt("1>", np.arange(index, dtype=np.int32), "", {}, seed=0, min_version=0)
        self.table.put(self.table.subject(row, "prompt"), prompt)
        return str(row)

    def await_in_hand(self, *rows: str) -> None:
        """Wait until exactly these rows are being handled."""
        wait_until(lambda: set(self.box.read().rows) == set(rows), f"{rows} being handled")

    def values(self) -> dict[int, int]:
        """Written values by row index."""
        found = {index: self.table.get(self.table.subject(RowId(0, index), "count")) for index in range(8)}
        return {
            index: plain_value(self.table.read_envelope(cell.data)) for index, cell in found.items() if cell is not None
        }


@pytest.fixture
def at_work(table: Table, tmp_path: Path) -> Iterator[AtWork]:
    state = RunState(table.connection, table.connection.call(ensure_bucket(table.connection, table.subjects), 20))
    journal = Journal(table.connection, table.subjects, "counts", 0)
    role, box, stopping = Overlaps(), BlackBox(tmp_path / "counts.box"), asyncio.Event()
    # A row redelivered after a pause of this machine would be handled alone.
    config = load_config(TINY, ["supervision.ack_wait=60"])
    role.context = Context(config, RunFolder(tmp_path), "counts", 0, 1, table, state, journal)
    role.context.stopping = stopping.is_set
    create_consumer(role.context, role)
    failed: list[Any] = []
    with pool_pump(role, box, failed) as pump:
        run = table.connection.submit(pump.run(stopping))
        yield AtWork(role, table, box)
        role.ended.update(str(RowId(0, index)) for index in range(8))
        table.connection.loop.call_soon_threadsafe(stopping.set)
        table.connection.loop.call_soon_threadsafe(pump.wake)
        run.result(30)
    assert failed == []


def test_rows_join_a_running_batch_and_each_is_written_when_it_ends(at_work: AtWork) -> None:
    first = at_work.ask_for(1)
    at_work.await_in_hand(first)
    second, third = at_work.ask_for(2), at_work.ask_for(3)
    at_work.await_in_hand(first, second, third)
    assert at_work.values() == {}
    # The role has no free place yet.
    fourth = at_work.ask_for(4)
    at_work.role.ended.add(second)
    wait_until(lambda: at_work.values() == {2: 2}, "the value of the second")
    at_work.await_in_hand(first, third, fourth)
    at_work.role.ended.update((third, first, fourth))
    wait_until(lambda: at_work.values() == {1: 1, 2: 2, 3: 3, 4: 4}, "all values")
    at_work.await_in_hand()


def test_rows_of_an_actor_that_was_killed_from_outside_are_handled_together(
    table: Table, make_context: MakeContext, request: pytest.FixtureRequest
) -> None:
    """Agents work on all of them at once. A row that may have caused the death of an actor is still handled alone."""
    rows = die_with_rows(table, make_context("counts", "supervision.ack_wait=60"))
    at_work: AtWork = request.getfixturevalue("at_work")
    at_work.await_in_hand(*map(str, rows[:3]))
    at_work.role.ended.update(map(str, rows[:3]))
    for row in rows[3:]:
        at_work.await_in_hand(str(row))
        at_work.role.ended.add(str(row))


def test_rows_of_a_role_that_isolates_none_are_handled_together(
    table: Table, make_context: MakeContext, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents of a row that is handled alone may be waiting for other rows."""
    monkeypatch.setattr(Overlaps, "isolates_suspects", False)
    monkeypatch.setattr(Overlaps, "max_concurrent_rows", 5)
    rows = die_with_rows(table, make_context("counts", "supervision.ack_wait=60"))
    at_work: AtWork = request.getfixturevalue("at_work")
    at_work.await_in_hand(*map(str, rows))
    at_work.role.ended.update(map(str, rows))


def die_with_rows(table: Table, context: Context) -> list[RowId]:
    """Leave five rows behind: three by a kill from outside, one by a crash, one by a death that nobody counted."""
    create_consumer(context, Overlaps())
    prompt = Prompt("1>", np.zeros(0, np.int32), "", {}, seed=0, min_version=0)
    rows = [RowId(0, index) for index in range(5)]
    for row in rows:
        table.put(table.subject(row, "prompt"), prompt)
    taken: list[Delivery] = []

    async def die() -> None:
        pull = PullSubscription(table.connection, table.subjects.table_stream, "counts", 8, taken.append)
        await pull.start()
        while len(taken) < len(rows):
            await pull.fetch(8, 5)
        await pull.close()
        for row in rows[:3]:
            await context.state.count_failure("counts", row, "killed by SIGKILL", "", external_kill=True)
        await context.state.count_failure("counts", rows[3], "exit code 1", "")
        await nak_deliveries(table.connection, table.subjects.table_stream, "counts", taken)

    table.connection.call(die(), 30)
    return rows


def test_failing_row_does_not_affect_rows_that_have_ended(at_work: AtWork) -> None:
    first, second = at_work.ask_for(1), at_work.ask_for(2)
    at_work.await_in_hand(first, second)
    at_work.role.ended.add(first)
    wait_until(lambda: at_work.values() == {1: 1}, "the value of the first")
    at_work.role.fails = True
    dead = at_work.table.subject(RowId(0, 2), "quarantined")
    wait_until(lambda: at_work.table.get(dead), "the second in quarantine")
    assert at_work.table.get(at_work.table.subject(RowId(0, 1), "quarantined")) is None


@pytest.mark.parametrize("error", [ActorError("the server takes no weights"), SystemExit(3)])
def test_error_without_an_unfinished_row_ends_the_actor(pump: PoolPump, error: BaseException) -> None:
    """A role in a broken state must not continue and take the next rows for bad ones."""

    class Breaks(Counts):
        def stream(self, rows: Sequence[Row], more: More) -> Iterator[Results]:
            assert not more(0)
            yield [(row, 1) for row in rows]
            raise error

    jobs = [Job(Msg(None, "a"), RowId(1, 0), {"prompt": b""})]  # type: ignore[arg-type]
    settled: list[Job] = []
    with pytest.raises(type(error)):
        Handler(Breaks(), pump.context).run(jobs, lambda _: [], settled.extend)
    assert settled == jobs
    assert jobs[0].error is None


def test_role_with_stream_only_is_accepted() -> None:
    assert check_role(Overlaps, "here") is Overlaps


def test_redelivered_row_does_not_join_a_batch(table: Table) -> None:
    stream, connection = table.subjects.table_stream, table.connection
    filters = [table.subjects.column("prompt", "group")]
    prompt = Prompt("1>", np.array([1], np.int32), "", {}, seed=0, min_version=0)

    async def deliveries() -> list[Any]:
        await ensure_consumer(connection, stream, pool_spec("counts", filters, 3600.0, 100))
        taken: list[Delivery] = []
        pull = PullSubscription(connection, stream, "counts", 8, taken.append)
        await pull.start()
        await pull.fetch(1, 5)
        await nak_deliveries(connection, stream, "counts", taken)
        async with asyncio.timeout(10):
            while len(taken) < 2:
                await asyncio.sleep(0.01)
                # A request for rows expires after a second.
                await pull._refill()
        joined = await pull.fetch_nowait(8)
        found = [len(joined), [m.metadata.num_delivered for m in await pull.fetch(8, 5)]]
        await pull.close()
        return found

    table.put(table.subject(RowId(1, 0), "prompt"), prompt)
    assert table.connection.call(deliveries(), 30) == [0, [2]]


def test_frequent_requests_for_more_rows_cost_nothing_until_a_row_arrives(table: Table) -> None:
    stream, connection = table.subjects.table_stream, table.connection
    filters = [table.subjects.column("prompt", "group")]

    async def make() -> PullSubscription:
        await ensure_consumer(connection, stream, pool_spec("asks", filters, 3600.0, 100))
        pull = PullSubscription(connection, stream, "asks", 8, prefetch=False)
        await pull.start()
        return pull

    async def ask(pull: PullSubscription) -> list[Any]:
        return [pull.is_requested(1), await pull.fetch_nowait(3), pull.is_requested(3), pull.is_requested(4)]

    pull = connection.call(make(), 10)
    assert connection.call(ask(pull), 10) == [False, [], True, False]
    table.put(
        table.subject(RowId(1, 0), "prompt"), Prompt("1>", np.array([1], np.int32), "", {}, seed=0, min_version=0)
    )
    assert (
        len(wait_until(lambda: not pull.is_requested(1) and connection.call(pull.fetch_nowait(3), 10), "the row")) == 1
    )
    pull.wake()
    assert pull.is_requested(1)
    connection.call(pull.close(), 10)


def test_black_box_keeps_the_last_deliveries_and_can_be_reset(tmp_path: Path) -> None:
    writer, reader = BlackBox(tmp_path / "a.box"), BlackBox(tmp_path / "a.box")
    assert reader.read_with_deliveries().deliveries == ()
    deliveries = [Delivery(1, i, 2 * i) for i in range(1, MAX_DELIVERIES + 3)]
    for delivery in deliveries:
        writer.record_delivery(delivery)
    writer.record(["group.1.2"])
    assert set(reader.read_with_deliveries().deliveries) == set(deliveries[2:])
    assert reader.read_with_deliveries().rows == ("group.1.2",)
    reader.reset()
    assert reader.read_with_deliveries().deliveries == ()
    writer.close()
    reader.close()


def test_black_box_says_that_an_actor_waits_only_between_rows_and_requests(pump: PoolPump, tmp_path: Path) -> None:
    """Else the root would take the rows of an actor back that works on them."""
    box, watch = BlackBox(tmp_path / "counts.box"), pump.watch
    box.reset()
    assert box.waits()
    watch.start_rows(["group.1.2"])
    assert not box.waits()
    pump.context.report_waiting("the answer of a person")
    assert not box.waits()
    assert (box.read().rows, box.read().waiting_for) == (("group.1.2",), "the answer of a person")
    watch.start_other_work("answering requests")
    assert not box.waits()
    watch.start_waiting("a row with prompt")
    assert box.waits()
    box.close()
