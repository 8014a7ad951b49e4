"""The broker is killed, or unreachable for a while: the run waits, and continues."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from broker.server import Server
from tests.support.faults import hit, port_of, story_of, wait_for_cell
from tests.support.running import Run, settings_of, wait_until

MakeRun = Callable[..., Run]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [3, 20])
def test_run_ends_with_a_complete_ledger_although_its_broker_is_killed_repeatedly(
    make_run: MakeRun, kills: int
) -> None:
    # The run must not end before the test is connected again after the last kill.
    steps = 4 * kills + 60
    quick = ("supervision.intensity=50", "supervision.backoff_max=0.3")
    run = make_run("brokerkill", f"run.steps={steps}", *quick).start()
    wait_for_cell(run, "batch.0")
    port = port_of(run)
    for step in range(2, 4 * kills, 4):
        wait_for_cell(run, f"batch.{step}")
        hit(run, "broker")
    assert port_of(run) == port
    # The run may end before the test is connected again.
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["admitted"], result["trained"], result["in_flight"]) == (4 * steps, 4 * steps, 0)
    assert story_of(run).of("restarted") == []
    assert story_of(run).of("crashed") == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seconds", [0, 60])
def test_run_waits_for_an_unreachable_broker_and_continues(make_run: MakeRun, tmp_path: Path, seconds: int) -> None:
    server = Server(tmp_path / "elsewhere")
    address = server.start()
    try:
        run = make_run("away", *settings_of(address), "run.steps=20").start()
        wait_for_cell(run, "batch.5")
        run.disconnect()
        assert server.process is not None
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()

        def is_logged() -> bool:
            return any("broker_disconnected" in path.read_text() for path in (run.folder.root / "logs").glob("*.log"))

        wait_until(is_logged, "log line about the lost connection")
        # The outage lasts this long; a run that exits because of it is noticed at once.
        assert run.process is not None
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(seconds)
        assert run.process.poll() is None
        server = Server(tmp_path / "elsewhere")
        server.start()
        code, result, said = run.finish()
        assert code == 0, said
        assert (result["admitted"], result["trained"], result["restarts"]) == (80, 80, 0)
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_actor_is_declared_dead_while_the_broker_is_stopped(make_run: MakeRun, tmp_path: Path) -> None:
    server = Server(tmp_path / "elsewhere")
    address = server.start()
    try:
        run = make_run("impatient", *settings_of(address), "run.steps=20", "supervision.heartbeat=3").start()
        wait_for_cell(run, "batch.5")
        run.disconnect()
        assert server.process is not None
        # A stopped broker neither answers nor closes its connections.
        server.process.send_signal(signal.SIGSTOP)
        assert run.process is not None
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(12)
        server.process.send_signal(signal.SIGCONT)
        code, result, said = run.finish()
        assert code == 0, said
        assert (result["trained"], result["restarts"]) == (80, 0)
        assert "no sign of life" not in run.folder.log("node").read_text()
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_actor_that_dies_during_an_outage_of_the_broker_does_not_end_the_run(make_run: MakeRun, tmp_path: Path) -> None:
    """Its restarts fail until the broker is back, and do not count."""
    server = Server(tmp_path / "elsewhere")
    address = server.start()
    try:
        run = make_run("orphan", *settings_of(address), "run.steps=20", "supervision.intensity=1").start()
        wait_for_cell(run, "batch.5")
        run.disconnect()
        server.stop(0)
        hit(run, "reward.0")
        assert run.process is not None
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(75)
        assert run.process.poll() is None
        server = Server(tmp_path / "elsewhere")
        server.start()
        code, result, said = run.finish()
        assert code == 0, said
        assert (result["admitted"], result["trained"]) == (80, 80)
    finally:
        server.stop()
