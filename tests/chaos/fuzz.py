"""Floods living runs with malformed messages: `python -m tests.chaos.fuzz [--count N] [--seed S]`.

Each round is a run of its own. It must end as if nothing had happened: every step trained, no actor died, the ledger
holds, and each malformed cell that an actor reads is quarantined, dropped, removed or of no row that anybody wants.
Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from nats.aio.msg import Msg

from broker.errors import CodecError, StoreError
from broker.subjects import CellId
from broker.table import Cell, Table
from relax_actors.actor import COLUMNS
from relax_actors.cli.connect import connected
from relax_actors.cli.summary import read_ledger
from relax_actors.messages import Batch
from relax_actors.roles.reading import KINDS
from tests.support.fuzzing import Fuzzer
from tests.support.running import Run, wait_until

POOLS = ("rollout", "reward", "advantages")
WINDOW = 1000
PATIENCE = 10.0
DEADLINE = 900.0
SETTINGS = ("supervision.ack_wait=2", "eval.rows=6", "eval.every=20", "eval.data.kind=python")
SETTINGS += (
    "eval.data.function=tiny_tasks.make",
    "eval.reward=tiny_tasks.share_of_sevens",
    "trainer.checkpoint_every=4",
)
Answers = Counter[tuple[str, str]]


async def flood(run: Run, seed: int, count: int, rate: float) -> Answers:
    """Publish messages to a living run; counts them by kind of subject and by what the server said.

    Args:
        run: where to.
        seed: of the messages.
        count: how many.
        rate: at most so many a second.
    """
    table, step = run.table, 0
    fuzzer = Fuzzer(run.name, seed, lambda: step)
    nc = table.bridge.nc
    inbox = nc.new_inbox()
    answers: Answers = Counter()
    waiting: dict[str, str] = {}
    room = asyncio.Event()

    async def answered(message: Msg) -> None:
        kind = waiting.pop(message.subject.rsplit(".", 1)[1], None)
        if kind is not None:
            answers[kind, answer_of(message.data)] += 1
        room.set()

    subscription = await nc.subscribe(f"{inbox}.*", cb=answered)
    began = time.monotonic()
    for i in range(count):
        message = fuzzer.message()
        waiting[str(i)] = message.kind
        await nc.publish(message.subject, message.data, reply=f"{inbox}.{i}", headers=message.headers)
        if i % 100 == 0:
            step = await present_step(table, step)
            await asyncio.sleep(max(0.0, began + i / rate - time.monotonic()))
        end = time.monotonic() + PATIENCE
        while len(waiting) >= WINDOW and time.monotonic() < end:
            room.clear()
            await asyncio.wait_for(room.wait(), PATIENCE)
    end = time.monotonic() + PATIENCE
    while waiting and time.monotonic() < end:
        await asyncio.sleep(0.05)
    await subscription.unsubscribe()
    answers.update((kind, "no answer") for kind in waiting.values())
    return answers


def answer_of(data: bytes) -> str:
    """What became of a message, by the server's answer."""
    error = json.loads(data).get("error")
    if error is None:
        return "stored"
    text = str(error["description"])
    if "per subject" in text:
        return "refused: written once"
    return "refused: size" if "size" in text else f"refused: {text}"


async def present_step(table: Table, step: int) -> int:
    """The first step from `step` on whose batch is not written."""
    while (cell := await table.get_async(table.subjects.numbered("batch", step))) is not None:
        try:
            table.read(cell.data, Batch, subject=cell.subject)
        except CodecError:
            break
        step += 1
    return step


async def handled(table: Table, until: int) -> bool:
    """Whether every pool has dealt with all messages up to a sequence number."""
    for pool in POOLS:
        info = await table.bridge.js.consumer_info(table.subjects.table_stream, pool)
        if info.num_pending and info.ack_floor.stream_seq < until:
            return False
    return True


async def last_sequence(table: Table) -> int:
    """Sequence number of the table's last message."""
    return int((await table.bridge.js.stream_info(table.subjects.table_stream)).state.last_seq)


def one_round(cwd: Path, name: str, seed: int, count: int, *, steps: int, rate: float) -> tuple[Answers, list[str]]:
    """Flood one run; gives the server's answers, what was done with what it stored, and what is wrong."""
    run = Run(cwd, name, [*SETTINGS, f"run.steps={steps}"]).start()
    try:
        wait_until(lambda: run.table.get(f"relax.{name}.batch.0"), "batch.0", 120)
        table = run.table
        answers = table.bridge.call(flood(run, seed, count, rate), DEADLINE)
        until = table.bridge.call(last_sequence(table), 10)

        def over() -> bool:
            assert run.process is not None
            return run.process.poll() is not None or table.bridge.call(handled(table, until), 30)

        wait_until(over, "end of what the pools have to handle", DEADLINE)
        run.disconnect()
        code, result, said = run.finish(DEADLINE)
    finally:
        run.stop()
    if code != 0:
        return answers, [f"exit code {code}: {said[-3000:]}"]
    reactions, wrong = account(run, until)
    answers.update(reactions)
    if result["restarts"]:
        wrong.append(f"{result['restarts']} actors died")
    if (result["steps"], result["trained"]) != (steps, 4 * steps):
        wrong.append(f"{result['trained']} rows trained in {result['steps']} steps, not {4 * steps} in {steps}")
    return answers, wrong


def account(run: Run, until: int) -> tuple[Answers, list[str]]:
    """What a run that is over did with what it was sent, and what it did not answer for."""
    reactions: Answers = Counter()
    wrong = []
    with connected(str(run.folder.root)) as at:
        ledger = read_ledger(at.table, at.config)
        wrong += ledger.violations()
        account = ledger.account()
        if account.in_flight:
            wrong.append(f"{account.in_flight} rows are in flight")
        for event in events(at.table):
            if event.get("kind") in (
                "malformed_cell",
                "malformed_subject",
                "stray_cell",
                "suppressed",
                "row_quarantined",
            ):
                reactions["reaction", f"event {event['kind']}"] += int(event.get("count", 1)) if "of" in event else 1
            if event.get("kind") in ("crashed", "restarted"):
                wrong.append(str(event)[:2000])
        ended = {}
        for field in ("dropped", "quarantined"):
            columns = [at.table.subjects.column(field, kind) for kind in ("group", "eval")]
            ended |= {cell_id.row: field for cell_id, _ in at.table.snapshot(columns, headers_only=True)}
        for cell_id, cell in at.table.snapshot([f"{at.table.subjects.prefix}.>"]):
            if cell.sequence > until or (why := unreadable(at.table, cell_id, cell)) is None:
                continue
            if cell_id.kind in KINDS:
                wrong.append(f"{cell.subject} still lies there: {why}")
            elif cell_id.field in ("dropped", "quarantined"):
                reactions["cell", "ends its row unread"] += 1
            elif cell_id.row in ended:
                reactions["cell", f"row {ended[cell_id.row]}"] += 1
            elif ledger.state(cell_id.row) is None and cell_id.field in ("advantage", "reward"):
                reactions["cell", "of a row that nobody wants"] += 1
            elif cell_id.field in COLUMNS and cell_id.step >= ledger.floor:
                wrong.append(f"{cell.subject} was not answered: {why}")
            else:
                reactions["cell", "of a column that nobody reads"] += 1
    return reactions, wrong


def unreadable(table: Table, cell_id: CellId, cell: Cell) -> str | None:
    """Why a cell cannot be read as what its subject says; None if it can."""
    expected = KINDS.get(cell_id.kind) or COLUMNS.get(cell_id.field)
    try:
        if expected is not None:
            table.read(cell.data, expected, subject=cell.subject if cell_id.kind in KINDS else None)
    except (CodecError, StoreError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def events(table: Table) -> list[dict[str, Any]]:
    """The events that actors wrote, ours left out."""

    async def work() -> list[dict[str, Any]]:
        from broker.pull import Follower

        follower = Follower(table.bridge, table.subjects.log_stream, [f"{table.subjects.prefix}.event.>"])
        found: list[dict[str, Any]] = []
        async for batch in follower.batches(tick=0.5):
            for message in batch:
                if "Nats-Msg-Id" in (message.headers or {}):  # as the journal's have
                    found.append(json.loads(message.data))
            if not batch:
                break
        await follower.close()
        return found

    return table.bridge.call(work(), 120)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=1e9)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    given = parser.parse_args()
    total: Answers = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(given.rounds):
            began = time.monotonic()
            answers, wrong = one_round(
                folder,
                f"fuzz{i}",
                given.seed + i,
                given.count // given.rounds,
                steps=given.steps,
                rate=given.rate,
            )
            total += answers
            failures += [f"round {i} (seed {given.seed + i}): {text}" for text in wrong]
            state = "ok" if not wrong else f"{len(wrong)} failures, the first: {wrong[0][:600]}"
            print(f"round {i}: {time.monotonic() - began:.0f} s, {state}", file=sys.stderr, flush=True)
    for kind, answer in sorted(total):
        print(f"{kind:28} {answer:34} {total[kind, answer]:9}")
    print(
        f"{sum(n for (kind, _), n in total.items() if kind not in ('reaction', 'cell'))} messages in {given.rounds} runs"
    )
    for text in failures[:50]:
        print(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
