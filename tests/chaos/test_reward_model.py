"""GRPO with the rewards of a reward model, killed: the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.faults import story_of
from tests.support.kills import kill_actors
from tests.support.running import IMAGES, ON_POLICY, SUPPORT, TINY, Run, trained_weights

MakeRun = Callable[..., Run]
PICTURES = "tiny_image_examples.toml"
KINDS = {"text": ("tiny_examples.toml", "tiny_tasks.pairs", TINY), "pictures": (PICTURES, "tiny_images.pairs", IMAGES)}
"""Configuration and pairs of the reward model, and the configuration of the policy."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_kills_of_the_reward_model_do_not_change_the_weights(make_run: MakeRun, kind: str) -> None:
    examples, pairs, config = KINDS[kind]
    own = ("algorithm.name=reward_model", f"data.function={pairs}", "run.epochs=2")
    scores = make_run("scores", *own, config=SUPPORT / examples)
    scores.complete()
    model = f"roles.reward_model.model={scores.folder.model}"
    settings = (model, "reward.function={reward_model=1.0,exact_match=0.5}", *ON_POLICY, "run.steps=8")
    expected = trained_weights(make_run("calm", *settings, config=config))
    run = make_run("killed", *settings, config=config).start()
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
