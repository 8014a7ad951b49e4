"""Rows join a running batch on a real server, and each is written when it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.codec import plain_value
from broker.leases import RunState
from broker.pull import Delivery, PullSubscription, nak_deliveries
from broker.streams import ensure_bucket, ensure_consumer, pool_spec
from broker.subjects import RowId
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.messages import Prompt
from relax_actors.runtime import Context, More, Results, Role, Row, check_role
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from tests.support.contexts import MakeContext, create_consumer
from tests.support.pumps import pool_pump
from tests.support.running import TINY, wait_until


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
