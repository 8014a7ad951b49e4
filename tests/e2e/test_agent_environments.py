"""Agents that step the run's environment: its rewards train the policy, whatever is killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_actors.messages import Trajectory
from tests.support.faults import story_of, wait_for_cell
from tests.support.gateways import AGENTS
from tests.support.kills import kill_at, stopped_root
from tests.support.running import Run, wait_until

SETTINGS = (
    "agent.function=tiny_agents.act",
    "environment.name=tiny_pick.Sevens",
    "environment.options.pause=0.2",
    "reward.function=environment",
    "staleness.max=0",
    "run.steps=4",
    "trainer.checkpoint_every=100",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_agents_play_the_environment_of_the_run_and_kills_repeat_no_step(make_run: Callable[..., Run]) -> None:
    run = make_run("act", *SETTINGS, config=AGENTS).start()
    subject = f"relax.{run.name}.group.3.0.trajectory"
    wait_for_cell(run, "group.1.0.turns.0.4", 300)
    with stopped_root(run):
        kill_at(run, "rollout.0", "group.1.0.turns.0.4")
        kill_at(run, "environment.0", "group.2.0.turns.0.4")
        trajectory = wait_until(lambda: run.table.fetch(subject, Trajectory), "trajectory", 300)
    assert isinstance(trajectory, Trajectory)
    run.disconnect()
    code, result, said = run.finish(600)
    assert code == 0, said
    assert (result["steps"], result["trained"]) == (4, 8)
    assert (result["quarantined"], result["dropped"], result["in_flight"]) == (0, 0, 0)
    assert trajectory.metrics["turns"] == [3.0, 3.0]
    for sample, reward in zip(trajectory.samples, trajectory.metrics["environment_reward"], strict=True):
        said_ = [message for message in sample.messages if message["role"] == "assistant"]
        earned = sum(str(m["content"]).count("7") / max(1, len(str(m["content"]))) for m in said_)
        assert reward == pytest.approx(earned, abs=1e-6)
        seen = [m["content"] for m in sample.messages if m["role"] == "user"]
        assert seen[1:] == ["begin", "1", "2"]
    steps = story_of(run).steps()
    assert all(step["abs_delta"] <= 1e-5 for step in steps)
