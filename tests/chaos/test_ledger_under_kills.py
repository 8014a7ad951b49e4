"""Asynchronous runs under kills: no row is lost, none is trained twice, and none is generated again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.address import Address
from broker.connection import Connection
from broker.ordered_consumer import OrderedConsumer
from broker.subjects import Subjects
from tests.chaos.equivalence import killed_run
from tests.chaos.kill_plan import plan, steps_for
from tests.chaos.run_kinds import SETTINGS
from tests.support.faults import story_of
from tests.support.running import Run, wait_until

MakeRun = Callable[..., Run]
KILLS, SEED, LEAD = 30, 5, 2


class Witness:
    """Records every cell of a run as it is written, including those that are purged later."""

    def __init__(self, run: Run) -> None:
        wait_until(run.folder.address.exists, "broker.json")
        self.cells: list[tuple[str, bytes]] = []
        self._connection = Connection(Address.load(run.folder.address).for_user("operator"), "witness", deadline=60)
        subjects = Subjects(run.name)
        filters = [subjects.column(name) for name in ("prompt", "trajectory")] + [subjects.numbered("weights", "*")]
        self._follower = OrderedConsumer(self._connection, subjects.table_stream, filters)
        self._following = self._connection.submit(self._follow())

    async def _follow(self) -> None:
        async for messages in self._follower.batches(tick=0.5):
            self.cells += [(message.subject, message.data) for message in messages]
            await asyncio.sleep(0)

    def close(self) -> None:
        """Stop recording."""
        self._following.cancel()
        self._connection.close()

    def rows(self, field: str) -> Counter[str]:
        """Count how often a column of each row was written."""
        return Counter(subject.rsplit(".", 1)[0] for subject, _ in self.cells if subject.endswith(f".{field}"))


def proved(run: Run, cwd: Path) -> None:
    """Check that `relax ledger` finds no violation."""
    command = [sys.executable, "-m", "relax_actors.cli.main", "ledger", run.name, "--json"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_lose_no_row_and_repeat_no_training_and_no_generation(make_run: MakeRun, tmp_path: Path) -> None:
    kills = plan(KILLS, SEED)
    # An asynchronous run does not wait for the victim of a kill, so it may get ahead of the kills.
    steps = steps_for(kills) + 20
    settings = [s for s in SETTINGS if not s.startswith(("staleness", "run.deterministic", "trainer.checkpoint"))]
    run = make_run("ledger", *settings, f"staleness.max={LEAD}", "trainer.checkpoint_every=10000", f"run.steps={steps}")
    witnesses: list[Witness] = []

    def look(line: str) -> None:
        if not witnesses:
            witnesses.append(Witness(run))
        assert run.ledger().violations() == [], line
        if line.startswith(("kill 10 ", "kill 20 ")):
            proved(run, tmp_path)

    tally = killed_run(run, kills, look)
    assert tally.kills >= KILLS
    code, result, said = run.finish()
    assert code == 0, said
    (witness,) = witnesses
    witness.close()
    proved(run, tmp_path)
    assert (result["trained"], result["in_flight"]) == (4 * steps, 0)
    assert result["admitted"] == result["trained"] + result["dropped"] + result["quarantined"]
    story = story_of(run)
    trained = [f"{step}.{index}" for step, batch in story.values("batch").items() for index in batch.rows]
    assert len(trained) == len(set(trained)) == 4 * steps
    assert story.of("replay_diverged") == []
    # The witness misses the last few cells: the broker ends with the run.
    prompts, trajectories = witness.rows("prompt"), witness.rows("trajectory")
    assert set(prompts.values()) == set(trajectories.values()) == {1}
    assert len(prompts) <= result["admitted"]
    finished = {row for row in prompts if int(row.split(".")[-2]) < steps - LEAD - 3}
    assert len(finished) >= 4 * (steps - LEAD - 3)
    assert finished <= set(trajectories)
    # A replayed version must not be published again: a second cell with its subject would be counted here.
    versions = Counter(subject for subject, _ in witness.cells if ".weights." in subject)
    assert set(versions.values()) == {1}
