"""Several turns, with an environment or an agent, and what once worked for single answers alone, in whole runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from relax_actors.messages import Trajectory
from relax_actors.messages.experts import expand
from tests.support.faults import story_of
from tests.support.gateways import AGENTS
from tests.support.kills import fetched
from tests.support.running import TINY, Run

MakeRun = Callable[..., Run]
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
REPLAYED = (*(f"model.architecture.{name}={value}" for name, value in EXPERTS.items()), "trainer.router_replay=true")
GROUP = 3
COMMON = ("reward.function=environment", "staleness.max=0", "run.steps=3", "trainer.checkpoint_every=100")
TURNS = {
    "environment": (
        TINY,
        ("environment.name=tiny_pick.Pick", "data.function=tiny_pick.make", "rollout.max_tokens=2"),
    ),
    "agent": (AGENTS, ("agent.function=tiny_agents.play",)),
}


def first_row(run: Run) -> Trajectory:
    return fetched(run, "group.1.0.trajectory", Trajectory)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", TURNS)
def test_experts_of_turns_are_recorded_and_replayed(make_run: MakeRun, kind: str) -> None:
    config, settings = TURNS[kind]
    run = make_run("experts", *settings, *REPLAYED, *COMMON, config=config).start()
    trajectory = first_row(run)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["quarantined"], result["dropped"], result["in_flight"]) == (0, 0, 0)
    assert trajectory.routed_experts is not None
    assert trajectory.routed_experts.shape[1:] == (2, 2)
    chosen = [sequence.routed_experts for sequence in trajectory.sequences]
    assert max(len(sequence.spans) for sequence in trajectory.sequences if sequence.spans is not None) > 1
    for sequence, experts in zip(trajectory.sequences, chosen, strict=True):
        assert experts is not None
        assert len(experts) == len(sequence.token_ids) - 1
        assert (experts >= 0).all(), "the experts of every token of every turn are known"
    assert np.array_equal(expand(trajectory.routed_experts) >= 0, trajectory.routed_experts < 4)
    steps = story_of(run).steps()
    assert len(steps) == 3
    assert all(step["abs_delta"] <= 1e-5 for step in steps), "the trainer has the log-probs of the rollout"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", TURNS)
def test_turns_have_a_greedy_baseline(make_run: MakeRun, kind: str) -> None:
    config, settings = TURNS[kind]
    settings = (*settings, f"rollout.group_size={GROUP}", "algorithm.advantage=greedy", "algorithm.scale=none")
    run = make_run("greedy", *settings, *COMMON, config=config).start()
    trajectory = first_row(run)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["quarantined"], result["in_flight"]) == (0, 0)
    assert (trajectory.greedy_samples, len(trajectory.texts)) == (1, GROUP + 1)
    assert trajectory.trained_lengths[-1] == 0
    assert trajectory.trained_lengths[:-1].min() > 0
    steps = story_of(run).steps()
    assert all(step["abs_delta"] <= 1e-5 for step in steps)
