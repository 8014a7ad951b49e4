"""Stopped processes: found by missing signs of life, killed and replaced; other actors handle their rows."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import hit, story_of
from tests.support.running import Run, wait_until

MakeRun = Callable[..., Run]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("who", ["node", "broker"])
def test_stopped_supervisor_or_broker_is_killed_and_replaced(make_run: MakeRun, who: str) -> None:
    run = make_run(f"stopped{who}", "run.steps=3000", "supervision.heartbeat=2", "supervision.ack_wait=1").start()
    for step in (2, 8):
        wait_until(lambda step=step: run.table.get(f"relax.{run.name}.batch.{step}"), f"batch.{step}", 90)
        trainer = wait_until(lambda: run.pid_of("trainer.0"), "trainer")
        pid = hit(run, who, signal.SIGSTOP)
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"end of the stopped {who}")
        if who == "node":
            # A node that is still starting has a longer deadline than one that has started actors.
            wait_until(lambda old=trainer: run.pid_of("trainer.0") not in (None, old), "another trainer", 90)
    run.end_in_order()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stopped_actors_are_killed_and_replaced(make_run: MakeRun) -> None:
    run = make_run(
        "stopped",
        "run.steps=16",
        "reward.function=tiny_tasks.slow_share_of_sevens",
        "supervision.heartbeat=2",
        "supervision.ack_wait=1",
        "supervision.intensity=50",
    ).start()
    for step, actor in enumerate(("rollout.0", "reward.0", "advantages.0", "prompts.0", "trainer.0"), 2):
        wait_until(lambda step=step: run.table.get(f"relax.stopped.batch.{step}"), f"batch.{step}", 90)
        pid = hit(run, actor, signal.SIGSTOP)
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"end of the stopped {actor}")
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["admitted"], result["trained"], result["in_flight"]) == (64, 64, 0)
    crashes = {f"{e['role']}.{e['n']}": e["reason"] for e in story_of(run).of("crashed")}
    assert set(crashes) == {"rollout.0", "reward.0", "advantages.0", "prompts.0", "trainer.0"}
    assert all("no sign of life" in reason for reason in crashes.values()), crashes
