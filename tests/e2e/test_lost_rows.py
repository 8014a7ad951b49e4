"""A run goes on although a client takes its rows with a role's credentials, and writes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from broker.address import Address
from broker.connection import Connection
from broker.pull import PullSubscription
from broker.streams import wait_for_consumer
from broker.subjects import Subjects
from tests.support.faults import kill_root, story_of
from tests.support.pool_clients import DELAY_FOR_GOOD
from tests.support.running import Run, relax, wait_until

MakeRun = Callable[..., Run]
SETTINGS = ("supervision.ack_wait=1", "supervision.heartbeat=5", "run.deterministic=true")
ACKNOWLEDGE = b"+ACK"


def take(run: Run, role: str, number: int, answer: bytes) -> list[str]:
    """Answer messages of a role in competition with its actors, and write nothing; return their subjects."""
    run.table  # noqa: B018 waits for the broker
    subjects, found = Subjects(run.name), []
    with closing(Connection(Address.load(run.folder.address).for_user(role), role)) as connection:

        async def work() -> None:
            await wait_for_consumer(connection, subjects.table_stream, role)
            pull = PullSubscription(connection, subjects.table_stream, role, 4)
            await pull.start()
            end = time.monotonic() + 100
            while len(found) < number and time.monotonic() < end:
                for message in await pull.fetch(1, 1.0):
                    await connection.nc.publish(message.reply, answer)
                    found.append(message.subject)
            for message in pull.drain():
                await message.nak()
            await pull.close()
            await connection.nc.flush(10)

        connection.call(work(), 120)
    assert len(found) == number
    return found


def row_of(subject: str) -> str:
    """Row of a cell's subject, `relax.<run>.<row>.<column>`."""
    return ".".join(subject.split(".")[2:5])


def lost(run: Run) -> list[dict[str, Any]]:
    return story_of(run).of("row_lost")


@pytest.mark.slow
def test_a_run_goes_on_after_rows_were_acknowledged_without_a_result(make_run: MakeRun) -> None:
    run = make_run("thief", *SETTINGS).start()
    stolen = take(run, "reward", 6, ACKNOWLEDGE)
    run.disconnect()
    code, result, output = run.finish()
    assert code == 0, output
    assert (result["trained"], result["in_flight"]) == (32, 0)
    events = lost(run)
    assert {(event["role"], event["by"]) for event in events} == {("root", "reward")}
    assert {row_of(subject) for subject in stolen} == {event["row"] for event in events}


@pytest.mark.slow
@pytest.mark.parametrize("answer", [ACKNOWLEDGE, DELAY_FOR_GOOD], ids=["acknowledged", "delayed"])
def test_a_run_resumes_with_rows_that_were_taken_without_a_result(make_run: MakeRun, answer: bytes) -> None:
    """The root is killed before it has found them, or between the steps of their repair."""
    run = make_run("thief", *SETTINGS, "supervision.ack_wait=3", "run.steps=30").start()
    take(run, "reward", 2, answer)
    kill_root(run)
    run.start()
    root_log = run.folder.log("root")

    def found_or_over() -> bool:
        """An acknowledgement that died with the broker before it was on disk loses no row."""
        assert run.process is not None
        return "row_lost" in root_log.read_text() or run.process.poll() is not None

    wait_until(found_or_over, "event row_lost, or the end of the run", 240)
    assert run.process is not None
    if run.process.poll() is None:
        kill_root(run)
        run.start()
    code, result, output = run.finish()
    assert code == 0, output
    assert (result["trained"], result["in_flight"]) == (120, 0)
    assert "the ledger is complete" in relax("ledger", str(run.folder.root), cwd=run.cwd).stdout


@pytest.mark.slow
def test_a_run_goes_on_although_a_client_puts_rows_off_for_good(make_run: MakeRun) -> None:
    run = make_run("thief", *SETTINGS).start()
    stolen = {row_of(subject) for subject in take(run, "reward", 2, DELAY_FOR_GOOD)}
    run.disconnect()
    code, result, output = run.finish()
    assert code == 0, output
    assert (result["trained"], result["in_flight"]) == (32, 0)
    story = story_of(run)
    for kind in ("row_kept", "row_lost"):
        assert {event["row"] for event in story.of(kind)} == stolen, kind
    assert story.of("row_quarantined") == []


@pytest.mark.slow
def test_a_row_that_an_honest_actor_works_on_for_long_is_neither_lost_nor_done_twice(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Much longer than what counts as kept, while another actor of the role is idle."""
    monkeypatch.setenv("LONG", str(tmp_path / "long"))
    settings = ("run.steps=2", "data.size=8", "reward.replicas=2", "reward.function=tiny_tasks.one_takes_long")
    run = make_run("slow", *SETTINGS, *settings)
    assert run.complete()["trained"] == 8
    story = story_of(run)
    assert [story.of(kind) for kind in ("row_kept", "row_lost", "row_quarantined")] == [[], [], []]
    assert len((tmp_path / "long").read_text().splitlines()) == 4
