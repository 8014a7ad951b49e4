"""Death or hang of the zygote: its forks are restarted, and the run continues."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.support.faults import hit, log_of, story_of, wait_for_cell
from tests.support.running import Run, wait_until

MakeRun = Callable[..., Run]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_large_pool_survives_the_death_of_its_zygote_at_default_settings(
    make_run: MakeRun, number: signal.Signals
) -> None:
    run = make_run("forks", "run.steps=3000", "rollout.replicas=6").start()
    wait_for_cell(run, "batch.2")
    pid = hit(run, "zygote", number)
    # The second signal most likely hits the next zygote during its import.
    hit(run, "zygote", other_than=pid)
    last = max(story_of(run).values("batch"))
    wait_for_cell(run, f"batch.{last + 4}")
    every = {f"rollout.{n}" for n in range(6)}
    wait_until(lambda: {a for a in every if log_of(run.table, f"event.{a}.restarted")} == every, "all rollouts", 120)
    story = story_of(run)
    reasons = {event["reason"] for event in story.of("crashed")}
    assert "killed with zygote 1" in reasons
    assert all("zygote" in reason for reason in reasons), reasons
    assert story.of("gave_up") == []
    run.end_in_order()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_external_kills_do_not_end_a_run(make_run: MakeRun) -> None:
    run = make_run("often", "run.steps=3000", "supervision.intensity=1", "supervision.backoff_max=0.2").start()
    wait_for_cell(run, "batch.2")
    for n in range(1, 9):
        wait_until(lambda n=n: len(log_of(run.table, "event.rollout.0.ready")) >= n, "the next incarnation", 60)
        hit(run, "rollout.0")
    run.end_in_order()
