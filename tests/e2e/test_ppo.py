"""The example of PPO with a critic, in a short form: it trains both models, ends, and continues with more steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_actors.weights import files as weights
from tests.support.faults import story_of
from tests.support.running import Run, relax

EXAMPLE = Path(__file__).parents[2] / "examples" / "ppo" / "ppo.toml"
SHORT = (
    "run.steps=3",
    "trainer.schedule=constant",
    "trainer.prompts_per_step=4",
    "trainer.warm_start.steps=2",
    "critic.warmup_steps=1",
    "eval.rows=8",
    "eval.every=0",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ppo_trains_policy_and_critic_and_continues_with_more_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, "ppo", list(SHORT), config=EXAMPLE)
    prints = []
    for more, steps in ((), 3), (("run.steps=5",), 5):
        code, result, said = run.start(*more).finish(120)
        assert code == 0, said
        assert (result["steps"], result["trained"], result["in_flight"]) == (steps, 4 * steps, 0)
        prints.append(weights.fingerprint(weights.load(sorted(run.folder.critic.glob("*.safetensors")))))
        architectures = json.loads((run.folder.critic / "config.json").read_text())["architectures"]
        assert architectures == ["Qwen3ForTokenClassification"]
    assert prints[0] != prints[1]
    story = story_of(run)
    trained = {metric["step"]: metric for metric in story.metrics if metric.get("kind") == "critic"}
    assert sorted(trained) == [0, 1, 2, 3, 4]
    assert {metric["updates"] for metric in trained.values()} == {4}
    updates = {m["step"]: m["updates"] for m in story.steps()}
    assert updates == {0: 0, 1: 4, 2: 4, 3: 4, 4: 4}
    assert story.of("replay_diverged") == []
    assert "the ledger is complete" in relax("ledger", str(run.folder.root), cwd=tmp_path).stdout
