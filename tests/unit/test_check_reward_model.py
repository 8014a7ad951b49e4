"""Checks of the role reward_model before a run starts: each impossible setting names the reason and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from relax_actors.checks import examine
from relax_actors.config import load_config
from relax_actors.data.model_folder import prepare
from relax_actors.errors import ConfigError
from tests.support.running import IMAGES, TINY
from tests.support.sglang_servers import skip_if_missing

Errors = Callable[..., tuple[str, ...]]
USED = "reward.function=reward_model"


@pytest.fixture
def errors(tmp_path: Path) -> Errors:
    """Errors of the tiny configuration with settings."""

    def find(*settings: str) -> tuple[str, ...]:
        try:
            config = load_config(TINY, [f"run.folder={tmp_path / 'run'}", *settings])
        except ConfigError as error:
            return (str(error),)
        return examine(config).errors

    return find


def folder_of(
    folder: Path, architecture: str = "Qwen3ForSequenceClassification", classes: int = 1, config: Path = TINY
) -> Path:
    """Write the folder of a reward model; its weights are never read here."""
    prepare(load_config(config, []), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture]}))
    save_file({"score.weight": np.zeros((classes, 32), np.float32)}, folder / "model.safetensors")
    return folder


def test_folder_of_a_reward_model_is_accepted(errors: Errors, tmp_path: Path) -> None:
    model = f"roles.reward_model.model={folder_of(tmp_path / 'scores')}"
    assert errors(USED, model) == ()
    assert errors("reward.function={reward_model=1.0,exact_match=0.1}", model) == ()
    steps = folder_of(tmp_path / "steps", "Qwen3ForTokenClassification", 2)
    assert errors(USED, f"roles.reward_model.model={steps}", "roles.reward_model.steps=tokens") == ()


def test_server_of_sglang_holds_scores_of_answers_alone(errors: Errors, tmp_path: Path) -> None:
    skip_if_missing()
    served = "roles.reward_model.backend=sglang"
    assert errors(USED, served, f"roles.reward_model.model={folder_of(tmp_path / 'scores')}") == ()
    steps = folder_of(tmp_path / "steps", "Qwen3ForTokenClassification", 2)
    (error,) = errors(USED, served, f"roles.reward_model.model={steps}", "roles.reward_model.steps=min")
    assert "scores steps" in error
    other = folder_of(tmp_path / "other", "GemmaForSequenceClassification")
    (error,) = errors(USED, served, f"roles.reward_model.model={other}")
    assert "GemmaForSequenceClassification" in error
    assert 'set it to "torch"' in error


def test_folder_without_a_head_of_scores_is_refused(errors: Errors, tmp_path: Path) -> None:
    policy = folder_of(tmp_path / "policy", "Qwen3ForCausalLM")
    (error,) = errors(USED, f"roles.reward_model.model={policy}")
    assert str(policy) in error
    assert "Qwen3ForCausalLM" in error
    assert "reward_model" in error
    headless = folder_of(tmp_path / "headless")
    save_file({"weight": np.zeros(1, np.float32)}, headless / "model.safetensors")
    (error,) = errors(USED, f"roles.reward_model.model={headless}")
    assert "score.weight" in error
    empty = folder_of(tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    assert any("safetensors" in error for error in errors(USED, f"roles.reward_model.model={empty}"))
    assert any("config.json" in error for error in errors(USED, f"roles.reward_model.model={tmp_path / 'none'}"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "no role reads"),
        ((USED, "roles.reward_model.label=0"), "label = 0"),
        ((USED, "roles.reward_model.steps=mean"), "whole answers"),
        ((USED, "roles.reward_model.value=logit"), "value"),
        ((USED, "roles.reward_model.threshold=1"), "threshold"),
    ],
)
def test_setting_without_effect_is_refused(
    errors: Errors, tmp_path: Path, settings: tuple[str, ...], said: str
) -> None:
    model = f"roles.reward_model.model={folder_of(tmp_path / 'scores')}"
    assert any(said in error for error in errors(model, *settings))


def test_reward_of_a_model_that_nobody_serves_is_refused(errors: Errors) -> None:
    assert any("[roles.reward_model]" in error for error in errors(USED))
    held_out = ("eval.reward=reward_model", "eval.data.kind=python", "eval.data.function=tiny_tasks.make")
    assert any("eval.reward" in error and "[roles.reward_model]" in error for error in errors(*held_out))


def test_prompts_that_are_chats_need_a_reward_model_with_a_template(errors: Errors, tmp_path: Path) -> None:
    policy, model = tmp_path / "policy", folder_of(tmp_path / "scores")
    shutil.copytree(model, policy)
    (policy / "model.safetensors").unlink()
    (policy / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (policy / "config.json").write_text(
        (model / "config.json").read_text().replace("SequenceClassification", "CausalLM")
    )
    settings = (USED, f"roles.reward_model.model={model}")
    tree = TINY.read_text()
    begin, end = tree.index("[model.architecture]"), tree.index("[data]")
    file = tmp_path / "tiny.toml"
    file.write_text(f'{tree[:begin]}[model]\npath = "{policy}"\n{tree[end:]}')
    (tmp_path / "tiny_tasks.py").write_text((TINY.parent / "tiny_tasks.py").read_text())
    config = load_config(file, [*settings, f"run.folder={tmp_path / 'run'}"])
    assert any("chat template" in error and "data.chat" in error for error in examine(config).errors)


def test_prompts_with_media_need_a_reward_model_of_their_family(errors: Errors, tmp_path: Path) -> None:
    def found(model: Path, *settings: str) -> tuple[str, ...]:
        given = (f"run.folder={tmp_path / 'run'}", USED, f"roles.reward_model.model={model}", *settings)
        return examine(load_config(IMAGES, list(given))).errors

    text = folder_of(tmp_path / "text")
    (error,) = found(text)
    assert "reads text alone" in error
    assert "qwen3_vl" in error
    pictures = folder_of(tmp_path / "pictures", "Qwen3VLForSequenceClassification", config=IMAGES)
    assert found(pictures) == ()
    (error,) = errors(USED, f"roles.reward_model.model={pictures}")
    assert "reads media as qwen3_vl" in error
    (error,) = found(pictures, "roles.reward_model.backend=sglang")
    assert 'set it to "torch"' in error
    other = folder_of(tmp_path / "other", "Qwen3VLForSequenceClassification", config=IMAGES)
    said = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(said.replace('"8"', '"\u2468"'))
    (error,) = found(other)
    assert "tokenizer" in error
