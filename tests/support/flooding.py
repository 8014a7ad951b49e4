"""Publish malformed messages to a run, and check how the run answers them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from nats.aio.msg import Msg

from broker.errors import CodecError, StoreError
from broker.ordered_consumer import OrderedConsumer
from broker.subjects import CellId, RowId
from broker.table import Cell, Table
from relax_actors.messages import Batch
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.summary import read_ledger
from relax_actors.roles import numbered_cells
from relax_actors.roles.prompts import REQUEUE_COLUMNS
from relax_actors.runtime import COLUMNS
from relax_actors.training.ledger import Ledger
from tests.support.fuzzing import Fuzzer
from tests.support.running import Run, wait_until

POOLS = ("rollout", "reward", "advantages")
ROWS = 4
WINDOW = 1000
PATIENCE = 10.0
DEADLINE = 900.0
SETTINGS = (
    "supervision.ack_wait=2",
    "trainer.checkpoint_every=4",
    "eval.rows=6",
    "eval.every=20",
    "eval.data.kind=python",
    "eval.data.function=tiny_tasks.make",
    "eval.reward=tiny_tasks.share_of_sevens",
)
REACTIONS = ("malformed_cell", "malformed_subject", "stray_cell", "row_quarantined", "row_dropped")
Counts = Counter[tuple[str, str]]


async def flood(run: Run, seed: int, count: int, rate: float) -> Counts:
    """Publish messages to a run; count them by kind of subject and answer of the server.

    Args:
        run: where to.
        seed: of the messages.
        count: how many.
        rate: at most so many a second.
    """
    table, step = run.table, 0
    fuzzer = Fuzzer(run.name, seed, lambda: step, ROWS)
    nc = table.connection.nc
    inbox = nc.new_inbox()
    counts: Counts = Counter()
    waiting: dict[str, str] = {}
    room = asyncio.Event()

    async def answered(message: Msg) -> None:
        kind = waiting.pop(message.subject.rsplit(".", 1)[1], None)
        if kind is not None:
            counts[kind, answer_of(message.data)] += 1
        room.set()

    async def wait_for_room(size: int) -> None:
        end = time.monotonic() + PATIENCE
        while len(waiting) > size and (left := end - time.monotonic()) > 0:
            room.clear()
            await asyncio.wait_for(room.wait(), left)

    subscription = await nc.subscribe(f"{inbox}.*", cb=answered)
    began = time.monotonic()
    for i in range(count):
        message = fuzzer.message()
        waiting[str(i)] = message.kind
        await nc.publish(message.subject, message.data, reply=f"{inbox}.{i}", headers=message.headers)
        if i % 100 == 0:
            step = await present_step(table, step)
            await asyncio.sleep(max(0.0, began + i / rate - time.monotonic()))
        await wait_for_room(WINDOW)
    await wait_for_room(0)
    await subscription.unsubscribe()
    return counts


def answer_of(data: bytes) -> str:
    """Classify a message by the answer of the server."""
    error = json.loads(data).get("error")
    if error is None:
        return "stored"
    text = str(error["description"])
    if "per subject" in text:
        return "refused: written once"
    return "refused: size" if "size" in text else f"refused: {text}"


async def present_step(table: Table, step: int) -> int:
    """Return the first step from `step` on whose batch is not written."""
    while (cell := await table.get_async(table.subjects.numbered("batch", step))) is not None:
        try:
            table.read(cell.data, Batch, subject=cell.subject)
        except CodecError:
            break
        step += 1
    return step


async def handled(table: Table, until: int) -> bool:
    """Whether every pool has handled all messages up to a sequence number."""
    for pool in POOLS:
        info = await table.connection.js.consumer_info(table.subjects.table_stream, pool)
        if info.num_pending and info.ack_floor.stream_seq < until:
            return False
    return True


async def last_sequence(table: Table) -> int:
    """Sequence number of the table's last message."""
    return int((await table.connection.js.stream_info(table.subjects.table_stream)).state.last_seq)


def flooded(cwd: Path, name: str, seed: int, count: int, *, steps: int, rate: float) -> tuple[Counts, list[str]]:
    """Start a run, flood it and let it end; return counts of the messages, and all violations."""
    run = Run(cwd, name, [*SETTINGS, f"run.steps={steps}"]).start()
    try:
        wait_until(lambda: run.table.get(f"relax.{name}.batch.0"), "batch.0", 180)
        table = run.table
        counts = table.connection.call(flood(run, seed, count, rate), DEADLINE)
        until = table.connection.call(last_sequence(table), 10)

        def over() -> bool:
            assert run.process is not None
            return run.process.poll() is not None or table.connection.call(handled(table, until), 30)

        wait_until(over, "end of what the pools have to handle", DEADLINE)
        run.disconnect()
        code, result, said = run.finish(DEADLINE)
    finally:
        run.stop()
    if code != 0:
        return counts, [f"exit code {code}: {said[-3000:]}"]
    wrong = []
    if result["restarts"]:
        wrong.append(f"{result['restarts']} actors died")
    if (result["steps"], result["trained"]) != (steps, ROWS * steps):
        wrong.append(f"{result['trained']} rows trained in {result['steps']} steps, not {ROWS * steps} in {steps}")
    with connected(str(run.folder.root)) as at:
        ledger = read_ledger(at.table, at.config)
        account = ledger.account()
        wrong += ledger.violations()
        wrong += [f"{account.in_flight} rows are in flight"] if account.in_flight else []
        for reactions, faults in (_events(at.table), _cells(at.table, ledger, until)):
            counts.update(reactions)
            wrong += faults
    return counts, wrong


def _cells(table: Table, ledger: Ledger, until: int) -> tuple[Counts, list[str]]:
    """Classify the unreadable cells in the table, up to a sequence number."""
    counts: Counts = Counter()
    wrong = []
    ended = {}
    for field in ("dropped", "quarantined"):
        columns = [table.subjects.column(field, kind) for kind in ("group", "eval")]
        ended |= {cell_id.row: field for cell_id, _ in table.snapshot(columns, headers_only=True)}
    for cell_id, cell in table.snapshot([f"{table.subjects.prefix}.>"]):
        if cell.sequence > until or (why := unreadable(table, cell_id, cell)) is None:
            continue
        fate = None if cell_id.kind in numbered_cells() else _fate(cell_id, ended, ledger)
        if fate is None:
            wrong.append(f"{cell.subject} was not answered: {why}")
        else:
            counts["unreadable cell", fate] += 1
    return counts, wrong


def _fate(cell: CellId, ended: dict[RowId, str], ledger: Ledger) -> str | None:
    """How the run answered an unreadable cell of a row; None if it did not."""
    if cell.field not in COLUMNS:
        return "of a column that nobody reads"
    if cell.field in REQUEUE_COLUMNS:
        return "reported in an event"
    if cell.row in ended:
        return f"its row is {ended[cell.row]}"
    if cell.kind == "group" and cell.step < ledger.floor:
        return "of a step that is over"
    if cell.field == "advantage" and ledger.state(cell.row) is None:
        # Only the trainer reads this column, and only of rows that it may train.
        return "of a row that nobody wants"
    left_out = cell.kind == "eval" and cell.field in ("reward", "advantage")
    return "left out of an evaluation" if left_out else None


def unreadable(table: Table, cell_id: CellId, cell: Cell) -> str | None:
    """Why a cell cannot be read as its subject demands; None if it can."""
    expected = numbered_cells().get(cell_id.kind) or COLUMNS.get(cell_id.field)
    try:
        if expected is None:
            table.read_envelope(cell.data)
        else:
            table.read(cell.data, expected, subject=cell.subject if not cell_id.field else None)
    except (CodecError, StoreError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _events(table: Table) -> tuple[Counts, list[str]]:
    """Events about malformed messages, and events about a death."""
    counts: Counts = Counter()
    wrong = []
    for event in table.connection.call(_written_events(table), 120):
        kind, more = event.get("kind"), 1
        if kind == "suppressed":
            kind, more = event["of"], event["count"]
        if kind in REACTIONS:
            counts["event", kind] += more
        if kind in ("crashed", "restarted"):
            wrong.append(str(event)[:2000])
    return counts, wrong


async def _written_events(table: Table) -> list[dict[str, Any]]:
    """Events that actors wrote: they have a message id, those of the flood have none."""
    follower = OrderedConsumer(table.connection, table.subjects.log_stream, [f"{table.subjects.prefix}.event.>"])
    found: list[dict[str, Any]] = []
    async for batch in follower.batches(tick=0.5):
        found += [json.loads(message.data) for message in batch if "Nats-Msg-Id" in (message.headers or {})]
        if not batch:
            break
    await follower.close()
    return found
