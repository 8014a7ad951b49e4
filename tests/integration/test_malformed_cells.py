"""Malformed cells on a real server: what a pump answers, and how the row ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.subjects import RowId
from broker.table import Table
from relax_actors.messages import Quarantined, RowCounts
from relax_actors.roles.advantages import Advantages
from relax_actors.runtime import Role, Row
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.cells import MAX_END_BYTES, is_oversized
from relax_actors.runtime.finish import quarantine
from tests.integration.test_malformed import ROW, context_of, events
from tests.support.contexts import create_consumer
from tests.support.fuzzing import Fuzzer, samples
from tests.support.messages import assert_says
from tests.support.pumps import pool_pump
from tests.support.running import wait_until


class Looker(Role):
    """Reads all that a user's role may."""

    reads = ("prompt", "trajectory", "looked")
    writes = "seen"
    kinds = ("group", "eval")

    def handle(self, row: Row) -> list[Any]:
        return [len(row.prompt.tokens), len(row.trajectory.tokens), str(row.looked)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["advantages", "looker"])
def test_a_pump_answers_for_every_malformed_cell(table: Table, tmp_path: Path, name: str) -> None:
    role: Role = Advantages() if name == "advantages" else Looker()
    role.context = context_of(table, tmp_path, name)
    fuzzer = Fuzzer(table.subjects.run, 11)
    reads = ("reward",) if name == "advantages" else role.reads
    cells: dict[str, bytes] = {}
    for index in range(150):
        for column in reads:
            headers = fuzzer.random.random() < 0.7  # the others are as they should be
            good = table.encode(table.subject(RowId(0, index), column), samples().get(column, [1, 2]))
            cells[table.subject(RowId(0, index), column)] = fuzzer.content(column) if headers else good
    for odd in ("group.x.1", "group.1.01", "group.-1.0", "eval.9.é"):
        cells[f"{table.subjects.prefix}.{odd}.{reads[-1]}"] = b"x"
    table.put_encoded(sorted(cells.items()))

    crashed: list[BaseException] = []
    create_consumer(role.context, role)
    with pool_pump(role, BlackBox(tmp_path / "box"), crashed) as pump:
        stopping = asyncio.Event()
        running = table.connection.submit(pump.run(stopping))

        def done() -> bool:
            info = table.connection.call(table.connection.js.consumer_info(table.subjects.table_stream, name), 10)
            return running.done() or (info.num_pending == 0 and info.num_ack_pending == 0)

        wait_until(lambda: not table.connection.loop.is_closed() and pump._pull is not None, "pump")
        wait_until(done, "end of all messages", 60)
        table.connection.loop.call_soon_threadsafe(stopping.set)
        table.connection.loop.call_soon_threadsafe(pump.wake)
        running.result(20)
    assert crashed == []
    for index in range(150):
        row = RowId(0, index)
        ends = [f for f in (role.writes, "dropped", "quarantined") if table.get(table.subject(row, f)) is not None]
        assert len(ends) == 1, (row, ends)
    told = {e["kind"] for e in events(table)}
    assert {"row_quarantined", "malformed_subject"} <= told


@contextmanager
def pumped(role: Role, table: Table, folder: Path) -> Iterator[None]:
    """Pump a role until the block ends."""
    create_consumer(role.context, role)
    with pool_pump(role, BlackBox(folder / "box"), []) as pump:
        stopping = asyncio.Event()
        running = table.connection.submit(pump.run(stopping))
        yield
        table.connection.loop.call_soon_threadsafe(stopping.set)
        table.connection.loop.call_soon_threadsafe(pump.wake)
        running.result(20)


def test_a_column_without_those_it_is_made_of_is_quarantined(table: Table, tmp_path: Path) -> None:
    role = Looker()
    role.context = context_of(table, tmp_path, "looker")
    role.reads = ("prompt", "trajectory", "reward")  # type: ignore[misc]
    gone, not_admitted = RowId(1, 1), RowId(3, 5)
    table.put(table.subject(ROW, "prompt"), samples()["prompt"])
    for row in (not_admitted, gone, ROW):
        table.put(table.subject(row, "reward"), samples()["reward"])
    checkpoint = samples()["checkpoint"]
    floor = type(checkpoint)(3, "p", "f", 2, RowCounts(), 1)
    table.put(table.subjects.numbered("checkpoint", 3), floor)
    with pumped(role, table, tmp_path):
        found = wait_until(lambda: table.fetch(table.subject(ROW, "quarantined"), Quarantined), "quarantine")
    assert_says(found.error, "MalformedRow", "column reward", "before trajectory")
    assert table.get(table.subject(gone, "quarantined")) is None
    assert table.get(table.subject(not_admitted, "quarantined")) is None
    told = [event for event in events(table) if event["kind"] == "stray_cell"]
    assert [(event["subject"], event["error"]) for event in told] == [
        (table.subject(not_admitted, "reward"), "column reward of a row without a prompt"),
        (table.subject(gone, "reward"), "column reward of a row without a prompt"),
    ]


class Counter(Role):
    reads = ("prompt",)
    writes = "counted"

    def handle(self, row: Row) -> int:
        return len(row.prompt.tokens)


def test_a_result_older_than_its_input_quarantines_the_row(table: Table, tmp_path: Path) -> None:
    """Somebody wrote the column before the row was admitted; the role's own result is refused."""
    role = Counter()
    role.context = context_of(table, tmp_path, "counter")
    table.put(table.subject(ROW, role.writes), samples()["dropped"])
    table.put(table.subject(ROW, "prompt"), samples()["prompt"])
    with pumped(role, table, tmp_path):
        found = wait_until(lambda: table.fetch(table.subject(ROW, "quarantined"), Quarantined), "quarantine")
    assert_says(found.error, "MalformedRow", f"column {role.writes}", "before prompt")


def test_an_oversized_end_of_a_row_gives_way_to_a_real_one(table: Table, tmp_path: Path) -> None:
    context = context_of(table, tmp_path, "looker")
    subject = table.subject(ROW, "quarantined")
    table.put(subject, Quarantined("looker", 1, "x" * MAX_END_BYTES, ""))
    running = table.connection.submit(quarantine(context, ROW, 1, "a real error", ""))
    forged = table.get(subject)
    assert forged is not None
    assert is_oversized(table.subjects.parse(subject), forged)
    assert not running.done()
    table.remove([forged])  # as the trainer does
    running.result(20)
    found = table.fetch(subject, Quarantined)
    assert found is not None
    assert found.error == "a real error"
