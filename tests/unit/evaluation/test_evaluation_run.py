"""The configuration of `relax eval`, and what it refuses before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from relax_actors.checks import examine
from relax_actors.config import load_config, validate
from relax_actors.config.evaluation_run import digest_of, evaluation_tree
from relax_actors.config.load import load_tree
from relax_actors.errors import ConfigError
from relax_actors.evaluation.models import digest_of_files, model_folder
from tests.support.running import SUPPORT

EVAL = SUPPORT / "tiny_eval.toml"


def test_an_evaluation_has_no_steps_and_nothing_that_only_training_needs(tmp_path: Path) -> None:
    tree = load_tree(EVAL, ["trainer.learning_rate=1e-3", "algorithm.name=ppo", "staleness.max=2", "run.epochs=3"])
    tree["critic"] = {"warmup_steps": 1}
    config = validate(evaluation_tree(tree, tmp_path, [], "test"), "test")
    assert (config.run.steps, config.run.epochs, config.critic, config.algorithm.name) == (0, None, None, None)
    assert config.staleness.max == load_config(EVAL).staleness.max
    assert config.model.path == tmp_path
    assert config.eval is not None
    assert config.eval.named == load_config(EVAL).eval.named  # type: ignore[union-attr]
    assert config.reward.function == "tiny_tasks.share_of_sevens"


def test_a_configuration_of_examples_is_evaluated_by_answers() -> None:
    tree = load_tree(EVAL, ["algorithm.name=sft", "examples.train=all"])
    config = validate(evaluation_tree(tree, None, ["greedy"], "test"), "test")
    assert not config.from_data
    assert config.eval is not None
    assert list(config.eval.named) == ["greedy"]


def test_options_of_rewards_that_no_set_has_are_left_out() -> None:
    tree = load_tree(EVAL, ["reward.function=repetition", "reward.options.repetition={n=3}"])
    assert evaluation_tree(tree, None, [], "test")["reward"] == {"function": "tiny_tasks.share_of_sevens"}


def test_a_digest_follows_from_what_answers_depend_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def digest(*settings: str) -> str:
        tree = evaluation_tree(load_tree(EVAL, list(settings)), tmp_path, [], "test")
        return digest_of(tree, digest_of_files(tmp_path, []))

    same = digest()
    assert digest("supervision.intensity=9", "run.name=other", "trainer.learning_rate=1") == same
    assert len({same, digest("run.seed=4"), digest("eval.rows=5"), digest("rollout.max_tokens=20")}) == 4
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert digest() != same


def test_a_configuration_without_sets_and_an_unknown_set_are_refused() -> None:
    tree = load_tree(EVAL)
    with pytest.raises(ConfigError, match="no set 'easy'; its sets are greedy, drawn"):
        evaluation_tree(tree, None, ["easy"], "run.toml")
    with pytest.raises(ConfigError, match=r"run.toml: .*no held-out prompts"):
        evaluation_tree({name: own for name, own in tree.items() if name != "eval"}, None, [], "run.toml")


def test_what_is_no_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="'nothing' is no folder"):
        model_folder("nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"not a model folder: it has no config\.json"):
        model_folder("empty")
    run = tmp_path / "runs" / "young"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"schema": 1, "import_path": "", "config": {}}))
    with pytest.raises(ConfigError, match="run young has no model yet"):
        model_folder("young")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ['eval.reward="exact_match"', 'eval.data.function="tiny_tasks.pairs"'],
            r"36 of the first 36 rows have no answer",
        ),
        (['eval.category="level"'], r"eval.sets.drawn.data: no row has the field 'level'.* fields: i"),
    ],
)
def test_sets_that_cannot_have_figures_are_refused_by_the_check(settings: list[str], message: str) -> None:
    findings = examine(load_config(EVAL, settings))
    assert findings.errors
    assert any(re.search(message, error) for error in findings.errors), findings.errors
