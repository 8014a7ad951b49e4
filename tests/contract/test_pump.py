"""The pump on a real server, with messages as they come after a crash."""

from __future__ import annotations

import asyncio
import fcntl
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
from broker.lease import RunState
from broker.pull import StandingPull, give_back
from broker.store import digest
from broker.streams import ensure_bucket, ensure_consumer, pool_spec
from broker.subjects import RowId
from broker.table import Table
from relax_actors.actor import Context, Role, Row
from relax_actors.blackbox import HELD, BlackBox, Delivery
from relax_actors.config import load_config
from relax_actors.errors import ActorError
from relax_actors.journal import Journal
from relax_actors.mailbox import Mailbox
from relax_actors.messages import Dropped, Prompt
from relax_actors.pump import Job, PoolPump, Watch
from relax_actors.runfolder import RunFolder
from relax_actors.turns import Turns
from tests.support.running import TINY


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
    state = RunState(table.bridge, table.bridge.call(ensure_bucket(table.bridge, table.subjects), 20))
    journal = Journal(table.bridge, table.subjects, "counts", 0)
    role = Counts()
    role.context = Context(config, RunFolder(tmp_path), "counts", 0, 1, table, state, journal)
    box = BlackBox(tmp_path / "counts.box")
    mailbox = Mailbox.start()
    yield PoolPump(role, role.context, mailbox, Watch(role.context, box, 60.0, print), print)
    mailbox.stop()
    box.close()


async def delivered_again(table: Table) -> list[Msg]:
    """The messages of two prompts, each delivered for the second time."""
    stream, bridge = table.subjects.table_stream, table.bridge
    filters = [table.subjects.column("prompt", kind) for kind in ("group", "eval")]
    await ensure_consumer(bridge, stream, pool_spec("counts", filters, 3600.0, 100))
    taken: list[Delivery] = []
    pull = StandingPull(bridge, stream, "counts", 8, taken.append)
    await pull.start()
    while len(taken) < 2:
        await pull.next(8, 5)
    await give_back(bridge, stream, "counts", taken)
    found: list[Msg] = []
    while len(found) < 2:
        found += await pull.next(8, 5)
    await pull.close()
    return found


@pytest.mark.parametrize("row", [RowId(1, 0), RowId(4, 0, "eval")])
def test_a_message_that_comes_again_after_its_row_was_purged_is_not_handled(
    table: Table, pump: PoolPump, row: RowId
) -> None:
    prompt = Prompt("1>", np.array([1], np.int32), "", {}, seed=0, min_version=0)
    living = RowId(9, 0, row.kind)
    table.put_all((table.cell(each, "prompt"), prompt) for each in (row, living))

    again = table.bridge.call(delivered_again(table), 20)
    assert [m.metadata.num_delivered for m in again] == [2, 2]
    table.purge([table.subjects.row(row)])

    async def join() -> list[Any]:
        return await asyncio.gather(*map(pump._join, again))

    jobs = {job.row for job in table.bridge.call(join(), 20) if job is not None}
    assert jobs == {living}


@pytest.mark.parametrize("uri", ["../secret", "{outside}", "link/secret"])
def test_a_reference_out_of_the_store_drops_its_row_and_is_told(
    table: Table, pump: PoolPump, tmp_path: Path, uri: str
) -> None:
    """Though what lies there is just what the reference says."""
    tokens = np.arange(8, dtype=np.int32)
    outside = table.store.root.parent / "secret"
    outside.write_bytes(tokens.tobytes())
    table.store.root.mkdir(exist_ok=True)
    (table.store.root / "link").symlink_to(outside.parent)
    uri = uri.format(outside=outside)

    def elsewhere(array: NDArray[Any]) -> TensorRef:
        return TensorRef(uri, 0, array.nbytes, "int32", array.shape, digest(array.view(np.uint8)))

    row = RowId(2, 0)
    data = encode(Prompt("1>", tokens, "", {}, seed=0, min_version=0), "stranger.0#1", elsewhere)
    table.put_encoded([(table.cell(row, "prompt"), data)])

    async def handle() -> str:
        stream, bridge = table.subjects.table_stream, table.bridge
        await ensure_consumer(bridge, stream, pool_spec("counts", [table.subjects.column("prompt")], 60.0, 100))
        pull = StandingPull(bridge, stream, "counts", 8)
        await pull.start()
        await pump._process(await pull.next(8, 10))
        await pull.close()

        async def event() -> RawStreamMsg:
            return await bridge.js.get_last_msg(
                table.subjects.log_stream, table.subjects.event("counts", 0, "row_dropped")
            )

        for _ in range(100):
            with suppress(NotFoundError):
                return str((await event()).data)
            await asyncio.sleep(0.05)
        return "no event"

    said = table.bridge.call(handle(), 30)
    dropped = table.fetch(table.cell(row, "dropped"), Dropped)
    assert dropped is not None
    assert dropped.reason == "lost_segment"
    assert "points outside the store" in dropped.detail
    assert "points outside the store" in said
    assert table.get(table.cell(row, "count")) is None


class Looks(Counts):
    """Looks whether the device is free while it computes."""

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


def test_a_role_computes_only_while_the_shared_device_is_its_own(table: Table, pump: PoolPump, tmp_path: Path) -> None:
    device = tmp_path / "0.lock"
    role, row = Looks(), RowId(1, 0)
    role.device, pump.role = device, role
    pump.context.turn = turns = Turns(device, pump.context, 5.0)
    jobs = [Job(Msg(None, "a"), row, {"prompt": b""}) for _ in range(2)]  # type: ignore[arg-type]
    pump._handle(jobs)
    found = [job.data for job in jobs]
    assert [plain_value(table.open(data)) for data in found if data is not None] == [False, False]
    assert is_free(device)
    turns.close()


def test_a_device_that_does_not_get_free_blames_no_row_and_is_waited_for_once(
    table: Table, pump: PoolPump, tmp_path: Path
) -> None:
    pump.context.turn = turns = Turns(tmp_path / "0.lock", pump.context, 0.3)
    other = Turns(tmp_path / "0.lock", pump.context, 0.3)
    jobs = [Job(Msg(None, "a"), RowId(1, n), {"prompt": b""}) for n in range(3)]  # type: ignore[arg-type]
    with other():
        pump._handle(jobs)
    assert [type(job.error) for job in jobs] == [ActorError] * 3
    assert len({id(job.error) for job in jobs}) == 1
    turns.close()
    other.close()


def test_the_black_box_keeps_what_was_taken_last_and_begins_anew(tmp_path: Path) -> None:
    writer, reader = BlackBox(tmp_path / "a.box"), BlackBox(tmp_path / "a.box")
    assert reader.read_whole().taken == ()
    deliveries = [Delivery(1, i, 2 * i) for i in range(1, HELD + 3)]
    for delivery in deliveries:
        writer.took(delivery)
    writer.record(["group.1.2"])
    assert set(reader.read_whole().taken) == set(deliveries[2:])
    assert reader.read_whole().rows == ("group.1.2",)
    reader.begin()
    assert reader.read_whole().taken == ()
    writer.close()
    reader.close()
