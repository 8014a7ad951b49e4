"""The example of a reward model: it learns from pairs, and a policy learns from its scores what a rule asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.running import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_model" / "reward_model.toml"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_score_of_a_rule_rises_with_the_rewards_of_a_trained_model(make_run: Callable[..., Run]) -> None:
    # A worse reward model misleads the policy. Both stages have the same figures in each run on one machine.
    same = ("stages.pairs.run.deterministic=true", "stages.grpo.run.deterministic=true")
    short = ("stages.grpo.run.steps=50", "stages.grpo.eval.every=25", *same)
    result = make_run("reward-model", *short, config=EXAMPLE).complete()["stages"]
    pairs, grpo = result["pairs"], result["grpo"]
    assert (pairs["quarantined"], grpo["quarantined"]) == (0, 0)
    assert pairs["eval_first"] < 0.6
    assert pairs["eval_last"] > 0.7
    assert grpo["reward_last"] > grpo["reward_first"]
    assert grpo["eval_last"] >= grpo["eval_first"] + 0.2
