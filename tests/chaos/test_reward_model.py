"""GRPO with the rewards of a reward model, killed: the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.faults import story_of
from tests.support.kills import kill_actors
from tests.support.running import ON_POLICY, SUPPORT, Run, trained_weights

MakeRun = Callable[..., Run]
PAIRS = ("algorithm.name=reward_model", "data.function=tiny_tasks.pairs", "run.epochs=4")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_of_the_reward_model_do_not_change_the_weights(make_run: MakeRun) -> None:
    scores = make_run("scores", *PAIRS, config=SUPPORT / "tiny_examples.toml")
    scores.complete()
    model = f"roles.reward_model.model={scores.folder.model}"
    settings = (model, "reward.function={reward_model=1.0,exact_match=0.5}", *ON_POLICY)
    expected = trained_weights(make_run("calm", *settings))
    run = make_run("killed", *settings).start()
    kills = [
        ("group.0.0.trajectory", "reward_model.0"),
        ("group.1.0.reward_model", "reward.0"),
        ("batch.2", "trainer.0"),
        ("group.3.1.reward_model", "reward_model.0"),
        ("group.4.0.reward", "rollout.0"),
        ("weights.6", "reward_model.0"),
    ]
    kill_actors(run, kills)
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == expected
    assert (result["admitted"], result["trained"]) == (32, 32)
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    assert story_of(run).of("replay_diverged") == []
