"""Answers of the console about a run on a real broker, read as an observer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from broker.address import Address
from broker.server import is_listening
from broker.subjects import RowId
from relax_actors.console.app import Console
from relax_actors.console.guard import Tokens
from relax_actors.console.run import ConsoleRun
from relax_actors.console.runs import ConsoleRuns
from relax_actors.devices.machine import GpuUse, MachineUse
from relax_actors.messages import Batch, Checkpoint, Dropped, Prompt
from relax_actors.messages.cells import RowCounts
from tests.support.consoles import ROWS, WrittenRun
from tests.support.consoles import TOKENS as PROMPT
from tests.support.recorded_runs import recorded_machine
from tests.support.running import wait_until

TOKENS = Tokens("observer-token", "operator-token")
Get = Callable[[str], Awaitable[Any]]


def asked(run: WrittenRun, work: Callable[[Get], Awaitable[Any]]) -> Any:
    """Run `work` with a function that returns answers of a console."""

    async def main() -> Any:
        runs = ConsoleRuns(str(run.folder.root))
        app = Console(runs, {}).app(TOKENS)
        transport = httpx.ASGITransport(app=app)
        head = {"Authorization": f"Bearer {TOKENS.observer}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=head) as client:

            async def get(path: str) -> Any:
                answer = await client.get(f"/api/{path}")
                assert answer.status_code == 200, answer.text
                return answer.json()

            try:
                return await work(get)
            finally:
                await runs.close()

    return asyncio.run(main())


def test_answers_follow_the_run(written: WrittenRun) -> None:
    written.train(range(3))
    written.table.put(written.subjects.cell(RowId(3, 0), "dropped"), Dropped("no_signal", "equal rewards"))
    written.quarantine(RowId(3, 1), "ValueError: bad", "Traceback ...")
    written.journal("rollout").event("ready", seconds=1.5)

    async def work(get: Get) -> None:
        run = await get("run")
        assert (run["step"], run["steps"], run["live"], run["finished"]) == (3, 100, True, False)
        ledger = await get("ledger")
        # Rows that end without a prompt were never admitted.
        assert ledger["account"]["trained"] == 6
        assert ledger["adds_up"] is True
        assert [row["error"] for row in ledger["quarantined"]] == ["ValueError: bad"]
        curves = await get("curves?names=step/reward,step/none")
        assert curves["curves"]["step/reward"]["mean"] == [0.5, 0.501, 0.502]
        assert curves["curves"]["step/none"]["steps"] == []
        weights = await get("weights")
        assert [(v["version"], v["size"]) for v in weights["versions"]] == [(3, 1000), (2, 1000), (1, 1000), (0, 0)]
        events = await get("events?kind=ready")
        assert [event["sender"] for event in events["events"]] == ["rollout.0"]
        assert [actor["name"] for actor in (await get("actors"))["nodes"][0]["actors"]] == ["rollout.0"]
        assert {"role": "rollout", "wanted": 1, "present": 0} in (await get("scaling"))["pools"]
        written.train(range(3, 5))
        async with asyncio.timeout(20):
            while (await get("run"))["step"] != 5:  # noqa: ASYNC110 what was read is fresh for half a second
                await asyncio.sleep(0.05)
        assert (await get("curves?names=step/reward"))["curves"]["step/reward"]["steps"] == [0, 1, 2, 3, 4]

    asked(written, work)


def test_run_that_is_over_has_the_same_answers(written: WrittenRun) -> None:
    written.train(range(2))

    async def work(get: Get) -> tuple[Any, Any]:
        return await get("ledger"), await get("curves?names=step/loss")

    up = asked(written, work)
    written.stop()
    over = asked(written, work)
    assert up == over
    written.connect()


def test_another_run_beside_it_is_shown(written: WrittenRun, tmp_path: Path) -> None:
    other = WrittenRun(tmp_path, "other")
    other.train(range(1), reward=0.25)
    written.train(range(1))

    async def work(get: Get) -> None:
        assert (await get("runs"))["runs"] == ["seen", "other"]
        curves = [await get(f"curves?names=step/reward&run={name}") for name in ("seen", "other")]
        assert [found["curves"]["step/reward"]["mean"] for found in curves] == [[0.5], [0.25]]

    asked(written, work)
    other.stop()


def test_curves_of_a_long_run_are_thinned_out(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, steps=10_000)
    run.train(range(500))

    async def work(get: Get) -> None:
        found = (await get("curves?names=step/reward&points=100"))["curves"]["step/reward"]
        assert len(found["steps"]) == 100
        part = (await get("curves?names=step/reward&first=300&last=309"))["curves"]["step/reward"]
        assert part["steps"] == list(range(300, 310))

    asked(run, work)
    run.stop()


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[WrittenRun]:
    """A run of 400 steps; a checkpoint covers the first 380, and its cells say so."""
    run = WrittenRun(tmp_path, steps=1000)
    run.train(range(400))
    totals = RowCounts(admitted=380 * ROWS, trained=380 * ROWS)
    run.table.put(run.subjects.numbered("checkpoint", 390), Checkpoint(390, "checkpoints/1", "f", 380, totals))
    run.table.put(run.subjects.cell(RowId(400, 0), "prompt"), Prompt("3+4=", PROMPT, "7", {}, 1, 400))
    yield run
    run.stop()


def test_long_run_is_read_from_its_checkpoint_on_and_then_whole(long_run: WrittenRun) -> None:
    async def work(get: Get) -> None:
        run, ledger = await get("run"), await get("ledger")
        assert (run["step"], run["account"]["trained"], run["account"]["in_flight"]) == (400, 400 * ROWS, 1)
        assert (run["seconds"], run["steps_per_second"]) == (399.0, 1.0), "of all steps"
        assert (ledger["adds_up"], ledger["account"]["violations"], ledger["checked_from"]) == (True, [], 380)
        weights = await get("weights")
        assert (weights["count"], weights["versions"][-1]["version"]) == (401, 0)
        assert all(version["time"] > 0 for version in weights["versions"]), "also of the floor, which is looked up"
        assert (await get("rows?step=3"))["batch"]["reward"] == 0.5
        whole = await get("ledger")
        assert (whole["account"], whole["checked_from"]) == (ledger["account"], 0)

    asked(long_run, work)


def test_missing_batch_below_the_checkpoint_is_found_in_the_end(long_run: WrittenRun) -> None:
    (cell,) = long_run.table.get_all([long_run.subjects.numbered("batch", 7)])
    assert cell is not None
    long_run.table.remove([cell])

    async def work(get: Get) -> None:
        ledger = await get("ledger")
        assert (ledger["adds_up"], ledger["checked_from"]) == (True, 380), "what a checkpoint covers is read later"
        async with asyncio.timeout(20):
            while (ledger := await get("ledger"))["checked_from"]:
                assert ledger["adds_up"]
                await asyncio.sleep(0.05)
        assert "step 7 has weights but no batch" in ledger["account"]["violations"]

    asked(long_run, work)


def test_open_page_of_a_run_that_ended_keeps_nobody_from_resuming_it(written: WrittenRun) -> None:
    written.train(range(2))

    async def main() -> None:
        runs = ConsoleRuns(str(written.folder.root))
        head = {"Authorization": f"Bearer {TOKENS.observer}"}
        transport = httpx.ASGITransport(app=Console(runs, {}).app(TOKENS))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=head) as client:
            assert (await client.get("/api/run")).json()["live"] is True
            written.stop()
            await asyncio.to_thread(wait_until, lambda: not is_up(written), "the end of the broker")
            stream = await client.get("/api/log", headers={"Last-Event-ID": "1", "Relax-Pulse": "1"})
            assert stream.text.startswith("id: 1\nevent: over"), stream.text
            for name in ("run", "ledger", "events", "advice", "timeline"):
                pulse = await client.get(f"/api/{name}", headers={"Relax-Pulse": "1"})
                assert (pulse.status_code, pulse.json()["error"]["code"]) == (409, "run_not_up"), name
            written.folder.lock().close()  # as `relax up` takes it
            run = (await client.get("/api/run")).json()
            assert (run["live"], run["step"]) == (False, 2)
            pulse = await client.get("/api/run", headers={"Relax-Pulse": "1"})
            assert pulse.json()["step"] == 2, "a pulse reads what a person has opened"
            stream = await client.get("/api/log", headers={"Last-Event-ID": "1"})
            assert (stream.text.count("event: log"), stream.text.count("event: over")) == (1, 1), stream.text
        await runs.close()

    asyncio.run(main())
    written.connect()


@pytest.mark.slow
def test_connection_in_use_is_not_closed_as_idle(written: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_actors.console.run.IDLE_SECONDS", 3.0)
    written.stop()

    async def main() -> None:
        run = ConsoleRun(str(written.folder.root))
        connection = await run.connection()
        work = asyncio.create_task(run.within(connection, asyncio.sleep(6.0, "done")))
        while not work.done():
            await run.release_if_idle()
            await asyncio.sleep(0.1)
        assert await work == "done"
        assert await run.connection() is connection
        await run.close()

    asyncio.run(main())
    written.connect()


def test_run_that_is_over_is_read_whole_before_its_connection_is_closed_as_idle(
    long_run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_actors.console.run.IDLE_SECONDS", 1.0)
    monkeypatch.setattr("relax_actors.console.run.PAUSE_SECONDS", 0.5)  # three times, until no page is left
    long_run.stop()

    async def main() -> None:
        run = ConsoleRun(str(long_run.folder.root))
        ledger = (await run.refresh()).ledger
        assert ledger.checked_from == 380
        async with asyncio.timeout(20):
            while ledger.checked_from:
                await run.release_if_idle()
                await asyncio.sleep(0.05)
            while is_up(long_run):
                await run.release_if_idle()
                await asyncio.sleep(0.05)
        await run.close()

    asyncio.run(main())
    long_run.connect()


def test_machines_and_gpus_of_nodes_are_known_with_who_holds_them(written: WrittenRun) -> None:
    machine = recorded_machine()
    rollout = written.journal("rollout")
    rollout.metric({"rows": 3, "busy": 0.5, "rss_mib": 512, "version": 1})
    assert rollout.flush(10)
    written.trainer.metric({"rows": 2, "busy": 0.25})
    written.train(range(1))  # the newest metric of the trainer is that of a step

    async def work(get: Get) -> None:
        await get("actors")  # leases are heard from here on
        held = {"trainer.0": [0], "rollout.0": [0], "reward.0": "none"}
        written.node(0, "rollout.0", "trainer.0", gpus=held, machine=machine.plain())
        written.lease("rollout", 0, incarnation=1, rows=[], waits_for=None, doing_since=None)
        written.node(1, "reward.0", machine={"gpus": [{"number": "x"}, {"number": 1, "busy": "much"}], "load": -1})
        while len(nodes := (await get("actors"))["nodes"]) < 2:
            pass
        first, second = nodes
        assert MachineUse.of(first["machine"]) == machine
        assert first["holders"] == {"0": ["trainer.0", "rollout.0"]}
        figures = {actor["name"]: actor["figures"] for actor in first["actors"]}
        assert figures["rollout.0"] == {"rows": 3, "busy": 0.5, "rss_mib": 512}
        assert figures["trainer.0"] == {"rows": 2, "busy": 0.25}
        assert second["machine"] == MachineUse(gpus=[GpuUse(1, "")]).plain()
        served = {row["version"]: row["served_by"] for row in (await get("weights"))["versions"]}
        assert served == {1: ["rollout.0"], 0: []}

    asked(written, work)


def test_rate_leaves_out_the_time_during_which_the_run_was_not_up(written: WrittenRun) -> None:
    for step, begun in ((0, 0.0), (1, 0.5), (2, 1.0), (3, 5000.0), (4, 5000.5)):
        batch = Batch(list(range(ROWS)), 1, 1, 0.5, 0, 8, 1e9 + begun)
        written.table.put(written.subjects.numbered("batch", step), batch)

    async def work(get: Get) -> None:
        assert (await get("run"))["steps_per_second"] == 2.0

    asked(written, work)


def test_timeline_of_a_run_is_read_once_at_a_time(written: WrittenRun) -> None:
    written.train(range(4))

    async def work(get: Get) -> None:
        found = await asyncio.gather(*(get("timeline") for _ in range(4)))
        assert all(timeline == found[0] for timeline in found)
        assert found[0]["lanes"] is not None

    asked(written, work)


def is_up(run: WrittenRun) -> bool:
    """Whether the broker of a run listens."""
    return is_listening(Address.load(run.folder.broker / "address.json"))
