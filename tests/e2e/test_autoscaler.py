"""A run whose autoscaler adds a rollout while rows wait and takes it away when none do, although it is killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_actors.operations import OperationLog, State
from tests.support.faults import hit, log_of
from tests.support.running import Run, wait_until

SETTINGS = (
    "autoscaler.max=2",
    "autoscaler.interval=0.5",
    *(f"autoscaler.{name}=1" for name in ("out_for", "in_for", "out_cooldown", "in_cooldown")),
    "autoscaler.waiting_seconds=0.2",
    # A row takes seconds, and an actor takes one at a time.
    "rollout.max_concurrent_prompts=1",
    "environment.name=tiny_pick.Pick",
    "environment.options.pause=1",
    "data.function=tiny_pick.make",
    "rollout.max_tokens=2",
    "reward.function=tiny_tasks.gated_share_of_sevens",
    "staleness.max=0",
    "run.steps=100000",
)


def decisions(run: Run, *actions: str) -> list[dict[str, Any]]:
    """Events of the autoscaler."""
    return [event for event in log_of(run.table, "event.autoscaler.*.autoscaled") if event["action"] in actions]


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_run_grows_under_backlog_and_shrinks_while_its_autoscaler_is_killed(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    monkeypatch.setenv("GATE", str(gate))
    run = make_run("scaled", *SETTINGS).start()
    wait_until(lambda: run.pid_of("autoscaler.0"), "process of the autoscaler", 120)
    wait_until(lambda: decisions(run, "hold", "out"), "the first decision", 120)
    hit(run, "autoscaler.0")
    (out, *_) = wait_until(lambda: decisions(run, "out"), "a decision to add a rollout", 120)
    hit(run, "autoscaler.0")
    assert (out["before"], out["after"], out["refused"]) == (1, 2, "")
    assert out["figures"]["waiting"] > 0
    operations = OperationLog(run.table)
    wait_until(lambda: operations.read().operations[out["operation"]].state is State.ACTIVE, "the added rollout", 120)
    wait_until(lambda: run.pid_of("rollout.1"), "its process")
    gate.unlink()  # no row gets its reward, so that the rollouts run out of rows
    (into, *_) = wait_until(lambda: decisions(run, "in"), "a decision to take a rollout away", 120)
    hit(run, "autoscaler.0")
    assert (into["before"], into["after"]) == (2, 1)
    wait_until(lambda: operations.read().operations[into["operation"]].state is State.REMOVED, "its end", 120)
    wait_until(lambda: run.pid_of("rollout.1") is None, "the end of its process")
    gate.touch()
    run.end_in_order()
