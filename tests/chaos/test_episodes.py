"""Runs with episodes: masks with holes, several sequences a sample, rewards of single tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.messages import Trajectory
from tests.support.faults import story_of
from tests.support.kills import kill_actors
from tests.support.running import ON_POLICY, Run, processes_of, wait_until

EPISODES = (
    "rollout.actor=tiny_episodes.Branches",
    "roles.token_reward.actor=tiny_episodes.TokenReward",
    "advantages.reads=token_reward",
    "algorithm.aggregate=sample_mean_of_means",
    "algorithm.scale=none",
    "algorithm.whiten=tokens",
    "rollout.stop=['12', '77', '90']",
)
KILLS = (
    ("group.1.0.prompt", "rollout.0"),
    ("group.2.1.trajectory", "token_reward.0"),
    ("batch.3", "trainer.0"),
    ("group.5.0.token_reward", "advantages.0"),
    ("batch.6", "trainer.0"),
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_actors_do_not_change_the_weights_of_a_run_with_episodes(
    tmp_path: Path, make_run: Callable[..., Run]
) -> None:
    alone = make_run("calm", *ON_POLICY, *EPISODES).complete()
    run = make_run("killed", *ON_POLICY, *EPISODES).start()
    kill_actors(run, KILLS)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == alone["weights_fingerprint"]
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    assert story_of(run).of("replay_diverged") == []
    assert processes_of(run.folder.root) == []


@pytest.mark.slow
def test_a_row_with_a_token_reward_of_nan_is_quarantined_and_replaced(
    tmp_path: Path, make_run: Callable[..., Run]
) -> None:
    bad = ("roles.token_reward.actor=tiny_episodes.NanTokens", "run.steps=3")
    run = make_run("notfinite", *EPISODES, *bad)
    result = run.complete()
    assert result["trained"] == result["admitted"] - result["quarantined"] - result["dropped"]
    quarantined = story_of(run).of("row_quarantined")
    assert quarantined
    assert all("token_values of a reward is not finite" in event["error"] for event in quarantined)


@pytest.mark.slow
def test_rows_of_a_run_with_episodes_hold_branches_and_masks(tmp_path: Path, make_run: Callable[..., Run]) -> None:
    run = make_run("branches", *ON_POLICY, *EPISODES, "run.steps=2")
    run.start()
    cell = wait_until(lambda: run.table.get(f"relax.{run.name}.group.0.0.trajectory"), "trajectory", 120)
    trajectory = run.table.read(cell.data, Trajectory)
    assert trajectory.counts.tolist() == [2] * len(trajectory.texts)
    assert trajectory.loss_mask is not None
    assert trajectory.shared_lengths is not None
    assert trajectory.metrics == {"turns": [3.0] * len(trajectory.texts)}
    run.disconnect()
    code, _, said = run.finish()
    assert code == 0, said
