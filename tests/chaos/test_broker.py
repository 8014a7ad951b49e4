"""The broker is killed, or goes away for a while: the run waits, and goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.server import Server
from tests.support.running import Run, processes_of, wait_until

MakeRun = Callable[..., Run]


def broker_pid(run: Run) -> int:
    def look() -> int | None:
        for pid in processes_of(run.folder.root):
            if b"nats-server\0-c" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None

    return int(wait_until(look, "nats-server"))


@pytest.mark.timeout(300)
def test_a_run_whose_broker_is_killed_again_and_again_ends_with_a_complete_ledger(make_run: MakeRun) -> None:
    run = make_run("brokerkill", "run.steps=30", "supervision.intensity=50").start()
    for step in (2, 8, 14, 20, 26):
        wait_until(lambda step=step: run.table.get(f"relax.brokerkill.batch.{step}"), f"batch.{step}", 120)
        os.kill(broker_pid(run), signal.SIGKILL)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["admitted"], result["trained"], result["in_flight"]) == (120, 120, 0)
    assert result["restarts"] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_waits_for_a_broker_that_is_away_and_goes_on(make_run: MakeRun, tmp_path: Path) -> None:
    server = Server(tmp_path / "elsewhere")
    address = server.start()
    try:
        url = f"nats://{address.user}:{address.password}@{address.url.removeprefix('nats://')}"
        run = make_run("away", f"broker.url={url}", "run.steps=20").start()
        wait_until(lambda: run.table.get("relax.away.batch.5"), "batch.5", 120)
        run.disconnect()
        assert server.process is not None
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()

        def anyone_says_so() -> bool:
            return any("broker_disconnected" in path.read_text() for path in (run.folder.root / "logs").glob("*.log"))

        wait_until(anyone_says_so, "word that the broker is away", 30)
        server = Server(tmp_path / "elsewhere")
        server.start()
        code, result, said = run.finish()
        assert code == 0, said
        assert (result["admitted"], result["trained"]) == (80, 80)
    finally:
        server.stop()
