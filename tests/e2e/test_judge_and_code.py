"""The examples of judge and code in a short form: a trained judge teaches a policy, and a model writes programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import story_of
from tests.support.programs import needs_bubblewrap
from tests.support.running import Run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_policy_learns_from_the_grades_of_a_judge_that_was_trained(tmp_path: Path) -> None:
    graded = Run(tmp_path, "judge", ["run.steps=150", "eval.every=0"], config=EXAMPLES / "judge" / "judge.toml")
    assert graded.complete()["eval_last"] > -0.6
    model = f"roles.judge.model={graded.folder.model}"
    run = Run(tmp_path, "policy", ["run.steps=60", model, "eval.every=0"], config=EXAMPLES / "judge" / "policy.toml")
    result = run.complete()
    assert (result["trained"], result["quarantined"]) == (60 * 32, 0)
    # The held-out reward is the rule, which the judge has learned and the policy has not seen.
    assert result["eval_last"] >= result["eval_first"] + 0.1
    metrics = [metric for metric in story_of(run).metrics if metric.get("role") == "judge"]
    assert metrics[-1]["agreement"] >= 0.9
    assert metrics[-1]["seconds"] > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_bubblewrap
def test_model_writes_programs_that_pass_tests(tmp_path: Path) -> None:
    settings = ("stages.grpo.run.steps=3", "stages.grpo.eval.rows=8", "stages.grpo.eval.every=0")
    result = Run(tmp_path, "code", list(settings), config=EXAMPLES / "code" / "code.toml").complete()
    sft, grpo = result["stages"]["sft"], result["stages"]["grpo"]
    assert (sft["trained"], grpo["trained"], grpo["quarantined"]) == (100 * 32, 3 * 8, 0)
    # Some of the programs run and give the right numbers.
    assert grpo["reward_last"] > 0
