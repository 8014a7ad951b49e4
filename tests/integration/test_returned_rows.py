"""Rows of an actor that has to leave: another actor gets them at once, and handles them together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from broker.streams import find_consumer
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.messages import Prompt
from relax_actors.runtime import Context, Role, Row
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.reporter import Reporter
from relax_actors.supervision.spec import Exit
from tests.support.contexts import MakeContext, create_consumer
from tests.support.pumps import pool_pump
from tests.support.running import wait_until

ROWS = 6
PROMPT = Prompt("1>", np.array([1], np.int32), "", {}, seed=0, min_version=0)


class Batches(Role):
    """Handles rows together, after `gate` is set."""

    reads = ("prompt",)
    writes = "count"
    max_concurrent_rows: ClassVar = ROWS
    batch_wait = 1.0
    prefetch: ClassVar = False

    def __init__(self) -> None:
        self.gate, self.batches = threading.Event(), []

    def handle_many(self, rows: Sequence[Row]) -> list[Any]:
        self.batches.append(len(rows))
        self.gate.wait(30)
        return [len(row.prompt.tokens) for row in rows]


class Prefetching(Batches):
    """Handles two rows together while it fetches the next ones."""

    max_concurrent_rows: ClassVar = 2
    prefetch: ClassVar = True


def actor(context: Context) -> Batches:
    role = Batches()
    role.context = context
    return role


def admit_rows(context: Context, role: Batches) -> None:
    """Create the consumer of a role, and admit the rows that it gets."""
    create_consumer(context, role)
    table = context.table
    table.put_all((f"{table.subjects.prefix}.group.0.{index}.prompt", PROMPT) for index in range(ROWS))


def pending(table: Table) -> int:
    """Messages that an actor holds."""
    look = find_consumer(table.connection, table.subjects.table_stream, "counts")
    return table.connection.call(look, 10).num_ack_pending


def test_another_actor_has_returned_rows_in_a_second_and_handles_them_together(
    make_context: MakeContext, tmp_path: Path
) -> None:
    context = make_context("counts", "supervision.ack_wait=3600")
    table, loop, failed = context.table, context.table.connection.loop, []
    leaves, stays = actor(context), actor(make_context("counts", incarnation=2))
    stays.gate.set()
    admit_rows(context, leaves)
    stopping = [asyncio.Event(), asyncio.Event()]
    boxes = [BlackBox(tmp_path / f"{n}.box") for n in range(2)]
    with pool_pump(leaves, boxes[0], failed) as first, pool_pump(stays, boxes[1], failed) as second:
        pumping = [asyncio.run_coroutine_threadsafe(first.run(stopping[0]), loop)]
        wait_until(lambda: leaves.batches == [ROWS], "all rows in the hands of the first actor")
        pumping.append(asyncio.run_coroutine_threadsafe(second.run(stopping[1]), loop))
        began = time.monotonic()
        rows = table.connection.call(first.give_back(), 10)
        wait_until(lambda: stays.batches, "its rows in the hands of the second")
        seconds = time.monotonic() - began
        wait_until(lambda: pending(table) == 0, "acknowledgement of all rows")
        leaves.gate.set()
        for stop, pump in zip(stopping, (first, second), strict=True):
            loop.call_soon_threadsafe(stop.set)
            loop.call_soon_threadsafe(pump.wake)
        for task in pumping:
            task.result(20)
    assert failed == []
    assert sorted(rows) == [f"group.0.{index}" for index in range(ROWS)]
    assert stays.batches == [ROWS], "nobody suspects the rows of having killed the first actor"
    assert seconds < 1.0 + Batches.batch_wait + 30.0  # and not `supervision.ack_wait`
    assert second.handled == ROWS


def test_prefetched_rows_of_an_actor_that_stops_count_as_returned(make_context: MakeContext, tmp_path: Path) -> None:
    context = make_context("counts", "supervision.ack_wait=3600")
    table, loop, failed = context.table, context.table.connection.loop, []
    leaves, stays = Prefetching(), actor(make_context("counts", incarnation=2))
    leaves.context = context
    stays.gate.set()
    admit_rows(context, leaves)
    stopping = [asyncio.Event(), asyncio.Event()]
    boxes = [BlackBox(tmp_path / f"{n}.box") for n in range(2)]
    with pool_pump(leaves, boxes[0], failed) as first, pool_pump(stays, boxes[1], failed) as second:
        pumping = [asyncio.run_coroutine_threadsafe(first.run(stopping[0]), loop)]
        wait_until(lambda: leaves.batches == [2] and pending(table) == ROWS, "rows that wait in the first actor")
        pumping.append(asyncio.run_coroutine_threadsafe(second.run(stopping[1]), loop))
        loop.call_soon_threadsafe(stopping[0].set)
        loop.call_soon_threadsafe(first.wake)
        wait_until(lambda: stays.batches, "its rows in the hands of the second")
        leaves.gate.set()
        wait_until(lambda: pending(table) == 0, "acknowledgement of all rows")
        loop.call_soon_threadsafe(stopping[1].set)
        loop.call_soon_threadsafe(second.wake)
        for task in pumping:
            task.result(20)
    assert failed == []
    assert stays.batches == [ROWS - 2], "nobody suspects the rows of having killed the first actor"
    returns = [table.call(context.state.failures("counts", RowId(0, index))).returns for index in range(ROWS)]
    assert sorted(returns) == [0, 0, *[1] * (ROWS - 2)]


@pytest.mark.parametrize("ends", ["in order", "killed after its return", "killed"])
def test_rows_of_an_actor_that_was_asked_to_stop_go_to_one_other_actor(
    make_context: MakeContext, subjects: Subjects, tmp_path: Path, ends: str
) -> None:
    context = make_context("counts", "supervision.ack_wait=3600")
    table, connection, failed = context.table, context.table.connection, []
    roles = [actor(context), *(actor(make_context("counts", incarnation=n)) for n in (2, 3))]
    leaves, stays, waits = roles
    waits.gate.set()
    admit_rows(context, leaves)
    journal = Journal(connection, subjects, "node", 0)
    reporter = Reporter(RunFolder(tmp_path / "run"), connection, context.state, journal)
    boxes, stop = [BlackBox(tmp_path / f"{n}.box") for n in range(3)], asyncio.Event()
    held_by = stays if ends != "killed" else leaves
    with ExitStack() as stack:
        pumps = [stack.enter_context(pool_pump(role, box, failed)) for role, box in zip(roles, boxes, strict=True)]

        def run(n: int) -> Future[None]:
            return asyncio.run_coroutine_threadsafe(pumps[n].run(stop), connection.loop)

        running = [run(0)]
        wait_until(lambda: leaves.batches == [ROWS], "all rows in the hands of the first actor")
        before = boxes[0].read_with_deliveries()
        if ends != "killed":
            running.append(run(1))
            connection.call(pumps[0].give_back(), 10)
            wait_until(lambda: stays.batches == [ROWS], "its rows in the hands of the second")
        running.append(run(2))
        last = boxes[0].read_with_deliveries() if ends == "killed after its return" else before
        reporter.ended("counts.0", Exit(normal=True, reason="stopped", held_rows=ends != "in order"), last)
        if ends == "killed":
            wait_until(lambda: waits.batches == [ROWS], "its rows handled together by another")
            row = RowId(0, 0)
            assert connection.call(context.state.failures("counts", row), 10).returns == 1
        else:
            table.put(f"{table.subjects.prefix}.group.1.0.prompt", PROMPT)
            wait_until(lambda: waits.batches, "a new row, behind rows that are returned")
            assert waits.batches == [1], "the rows of the second actor are not taken away"
        held_by.gate.set()
        leaves.gate.set()
        connection.loop.call_soon_threadsafe(stop.set)
        for pump in pumps:
            connection.loop.call_soon_threadsafe(pump.wake)
        for task in running:
            task.result(20)
    assert failed == []
