"""Pump on a real server, with messages as they are redelivered after a crash."""

from __future__ import annotations

import asyncio
import fcntl
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
from relax_actors.runtime import Context, More, Results, Role, Row
from relax_actors.runtime.blackbox import MAX_DELIVERIES, BlackBox
from relax_actors.runtime.device_lock import DeviceLock
from relax_actors.runtime.handler import Handler, Job
from relax_actors.runtime.join import Join
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.pool_pump import PoolPump
from relax_actors.runtime.run_folder import RunFolder
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
def pump(table: Table, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    config = load_config(TINY, [])
    state = RunState(table.connection, table.connection.call(ensure_bucket(table.connection, table.subjects), 20))
    journal = Journal(table.connection, table.subjects, "counts", 0)
    role = getattr(request, "param", Counts)()
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


class TakesTurns(Counts):
    """Handles rows one by one, and notes each; at the first one another actor begins to wait for the device."""

    waits: Path

    def __init__(self) -> None:
        self.order: list[str] = []
        self.first = threading.Event()

    def handle(self, row: Row) -> int:
        self.order.append(str(row.id))
        self.first.set()
        wait_until(lambda: not is_free(self.waits), "the other actor that waits")
        return 0

    def release_memory(self, _: Path | None) -> int:
        return 0

    def resume_memory(self) -> int:
        return 0


class TakesOneByOne(TakesTurns):
    """Role that gets its next row when it has finished the last one."""

    prefetch = False


@pytest.mark.parametrize("pump", [TakesTurns, TakesOneByOne], indirect=True)
def test_actor_keeps_the_device_while_rows_wait_at_its_consumer(table: Table, pump: PoolPump, tmp_path: Path) -> None:
    role, path, stopping = pump.role, tmp_path / "0.lock", asyncio.Event()
    assert isinstance(role, TakesTurns)
    role.waits = path.with_suffix(".next")
    mine, other = (DeviceLock([path], pump.context, 60.0, turn=3600.0) for _ in range(2))
    pump.context.device_lock, pump.context.yields_device = mine, mine.is_due
    mine.add(role)

    def compute() -> None:
        role.first.wait(60)
        with other():
            role.order.append("other")

    thread = threading.Thread(target=compute)
    thread.start()
    rows = [RowId(1, n) for n in range(6)]
    prompt = Prompt("1>", np.array([1], np.int32), "", {}, seed=0, min_version=0)
    table.put_all((table.subject(row, "prompt"), prompt) for row in rows)
    connection, spec = table.connection, pool_spec("counts", [table.subjects.column("prompt")], 60.0, 100)
    connection.call(ensure_consumer(connection, table.subjects.table_stream, spec), 20)
    running = asyncio.run_coroutine_threadsafe(pump.run(stopping), connection.loop)
    thread.join(60)
    assert role.order == [*map(str, rows), "other"]
    connection.loop.call_soon_threadsafe(stopping.set)
    connection.loop.call_soon_threadsafe(pump.wake)
    running.result(20)
    mine.close()
    other.close()


class Serves(Counts):
    """Is asked for further requests while it answers some, again and again."""

    def serve(self, until: Callable[[], bool]) -> None:  # noqa: ARG002 a request is short
        self.context.wake()

    def release_memory(self, _: Path | None) -> int:
        return 0

    def resume_memory(self) -> int:
        return 0


@pytest.mark.parametrize("pump", [Serves], indirect=True)
def test_requests_that_belong_to_no_row_do_not_prolong_a_turn(table: Table, pump: PoolPump, tmp_path: Path) -> None:
    path, stopping, connection = tmp_path / "0.lock", asyncio.Event(), table.connection
    mine, other = (DeviceLock([path], pump.context, 60.0, turn=3600.0) for _ in range(2))
    pump.context.device_lock, pump.context.yields_device = mine, mine.is_due
    mine.add(pump.role)
    spec = pool_spec("counts", [table.subjects.column("prompt")], 60.0, 100)
    connection.call(ensure_consumer(connection, table.subjects.table_stream, spec), 20)
    running = asyncio.run_coroutine_threadsafe(pump.run(stopping), connection.loop)
    pump.context.wake()
    wait_until(lambda: mine.resumed.count, "a request")
    for _ in range(3):
        with other():
            pass
    connection.loop.call_soon_threadsafe(stopping.set)
    connection.loop.call_soon_threadsafe(pump.wake)
    running.result(20)
    mine.close()
    other.close()


@pytest.mark.parametrize("prefetch", [False, True])
def test_pull_that_got_as_many_messages_as_it_asked_for_gets_more(
    table: Table,
    prefetch: bool,  # noqa: FBT001
) -> None:
    connection, stream = table.connection, table.subjects.table_stream
    prompt = Prompt("1>", np.array([1], np.int32), "", {}, seed=0, min_version=0)
    table.put_all((table.subject(RowId(1, n), "prompt"), prompt) for n in range(6))

    async def fetch() -> int:
        await ensure_consumer(connection, stream, pool_spec("counts", [table.subjects.column("prompt")], 60.0, 100))
        pull = PullSubscription(connection, stream, "counts", 2, prefetch=prefetch, asks=True)
        await pull.start()
        taken = len(await pull.fetch(2, 10))
        while taken < 6:  # requested by one call, and taken by a later one
            taken += len(await pull.fetch_nowait(2))
            await asyncio.sleep(0.001)
        assert not await pull.fetch(2, 0.1)
        await pull.close()
        return taken

    assert connection.call(fetch(), 20) == 6


def test_pull_whose_question_is_lost_requests_messages_again(table: Table) -> None:
    connection, requests = table.connection, list[dict[str, Any]]()

    async def lose(request: Msg) -> None:
        requests.append(json.loads(request.data))

    async def fetch() -> None:
        await connection.nc.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{table.subjects.table_stream}.nobody", cb=lose)
        pull = PullSubscription(connection, table.subjects.table_stream, "nobody", 4, prefetch=False, asks=True)
        await pull.start()
        while len(requests) < 2:
            assert not await pull.fetch(4, 2.0)
        await pull.close()

    connection.call(fetch(), 30)
    assert [("no_wait" in request, "expires" in request) for request in requests[:2]] == [(True, False), (False, True)]


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
