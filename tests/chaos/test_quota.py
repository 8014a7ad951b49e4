"""A role's credentials fill the broker while a run trains: the run ends as it would have ended, in bounded time."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from broker.address import Address
from broker.codec import MAX_CELL_BYTES, encode
from broker.connection import Connection
from broker.errors import BrokerError
from broker.table import publish
from relax_actors.monitoring.connection import connected
from relax_actors.monitoring.summary import read_ledger
from tests.support.faults import hit, story_of
from tests.support.running import ON_POLICY, Run, wait_until

MakeRun = Callable[..., Run]
STEPS, ROWS = 24, 4
TABLE_BYTES = 48 << 20
SETTINGS = (*ON_POLICY, f"run.steps={STEPS}", f"broker.max_bytes={TABLE_BYTES}")
DEADLINE = 300.0


class Flood(threading.Thread):
    """Writes stray cells as role `rollout`, as fast as the broker takes them."""

    def __init__(self, run: Run, seed: int) -> None:
        super().__init__(name="flood", daemon=True)
        self.stored = self.version = 0
        self.halt = threading.Event()
        self._run, self._random = run, random.Random(seed)
        # Cells of every size up to the largest: some hundred bytes fill the server's memory, 4 MiB its disk.
        self._cells = [encode({"x": b"x" * size}, "rollout.0#1") for size in (10, 10, 10, 1000, MAX_CELL_BYTES - 1024)]

    def run(self) -> None:
        while not self.halt.is_set():
            try:
                with closing(
                    Connection(Address.load(self._run.folder.address).for_user("rollout"), "flood", 1.0)
                ) as connection:
                    while not self.halt.is_set():
                        connection.call(self._write(connection), 10)
            except BrokerError:
                continue

    async def _write(self, connection: Connection) -> None:
        prefix, answers = f"relax.{self._run.name}", []
        for _ in range(100):
            cell = self._random.choice(self._cells)
            answers.append(await publish(connection.requests, f"{prefix}.{self._subject()}", cell))
        await asyncio.wait(answers)
        self.stored += sum(answer.exception() is None for answer in answers)

    def _subject(self) -> str:
        """Return a cell of no row that the run will have, or of one that is far from due."""
        pick = self._random.randrange
        subjects = [
            f"group.1000000.{pick(10**6)}.trajectory",
            f"group.{pick(10**17)}.{pick(ROWS)}.trajectory",
            f"group.{pick(STEPS)}.{ROWS + pick(10**6)}.trajectory",
            f"group.{pick(STEPS)}.{1000 + pick(10**6)}.quarantined",
            f"group.{pick(10**6)}x.{pick(100)}.trajectory",
            f"group.*.{pick(ROWS)}.trajectory",
            f"eval.{pick(40)}.{pick(100)}.trajectory",
        ]
        if self.version < STEPS - 10:
            subjects.append(f"group.{STEPS - 1}.{pick(ROWS)}.{self._random.choice(['trajectory', 'quarantined'])}")
        return self._random.choice(subjects)


def newest_version(run: Run) -> int:
    cell = run.table.get(run.table.subjects.numbered("weights", "*"), direct=False)
    return -1 if cell is None else run.table.subjects.parse(cell.subject).step


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flooded_run_ends_with_the_same_weights_and_no_strays(make_run: MakeRun) -> None:
    quiet = make_run("quiet", *SETTINGS).complete()
    run = make_run("flooded", *SETTINGS).start()
    assert run.process is not None
    wait_until(lambda: run.table.get("relax.flooded.batch.0"), "batch.0", 240)
    flood = Flood(run, seed=1)
    flood.start()
    began = time.monotonic()
    try:
        wait_until(lambda: flood.stored > 300, "a flood of cells", 120)
        hit(run, "trainer.0")  # amid the removal of strays
        while flood.version < STEPS - 1:
            flood.version = newest_version(run)
            assert time.monotonic() - began < DEADLINE
            time.sleep(0.05)
    finally:
        flood.halt.set()
        flood.join(60)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == quiet["weights_fingerprint"]
    assert (result["admitted"], result["trained"], result["quarantined"]) == (ROWS * STEPS, ROWS * STEPS, 0)
    with connected(str(run.folder.root)) as at:
        ledger = read_ledger(at.table, at.config)
        assert ledger.violations() == []
        left = at.table.list_subjects("relax.flooded.*.*.*.*")
        assert [subject for subject in left if int(subject.split(".")[3]) < ledger.floor] == []
        assert len(left) <= 2 * ROWS * 6, left
    story = story_of(run)
    removed = story.of("strays_removed")
    # A cell that the killed trainer was removing may be gone when its successor asks who wrote it.
    assert {event["by"].partition(" and the writer of ")[0] for event in removed} == {"rollout.0"}
    assert sum(event["cells"] for event in removed) > 300
    assert {event["by"] for event in story.of("table_full")} <= {"rollout.0", ""}
