"""Checks of several updates a batch and of the critic: what is refused before anything starts, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from relax_actors.checks import examine
from relax_actors.config import load_config
from relax_actors.data.model_folder import prepare
from relax_actors.engines.torch.model import build, build_critic
from relax_actors.errors import ConfigError
from tests.support.messages import assert_says

ROOT = Path(__file__).parents[2]
PPO = ROOT / "examples" / "ppo" / "ppo.toml"
DEMO = ROOT / "examples" / "demo" / "demo.toml"
CLUSTER = ROOT / "tests" / "support" / "cluster.toml"


def errors(path: Path, *settings: str) -> list[str]:
    return list(examine(load_config(path, list(settings))).errors)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The model folder of the example."""
    config = load_config(PPO, [f"run.folder={tmp_path / 'run'}"])
    prepare(config, tmp_path / "model")
    return tmp_path / "model"


def test_the_example_can_be_run_and_says_how_its_batches_are_used() -> None:
    found = examine(load_config(PPO, []))
    assert found.errors == ()
    (updates,) = (note for note in found.notes if "optimizer updates" in note)
    assert_says(updates, "4 optimizer updates of 8 rows each", "trainer.minibatches = 2", "trainer.stream = false")
    (start,) = (note for note in found.notes if "the critic starts" in note)
    assert_says(start, "from version 0 of the policy")
    short = examine(load_config(PPO, ["run.steps=10"])).notes
    (warmup,) = (note for note in short if "critic.warmup_steps" in note)
    assert_says(warmup, "critic.warmup_steps = 10 leaves no step of run.steps = 10 to train the policy")


def test_device_of_the_critic_is_checked() -> None:
    assert 'critic.device = \'gpu\' is no torch device; write "auto", "cpu", "cuda" or "cuda:<number>"' in errors(
        PPO, "critic.device=gpu"
    )


def test_minibatches_of_unequal_size_are_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(DEMO, ["trainer.minibatches=3"])
    assert_says(raised.value, "trainer.minibatches = 3", "trainer.prompts_per_step = 16", "choose a divisor")


@pytest.mark.parametrize(
    ("setting", "key"),
    [("trainer.epochs=2", "trainer.minibatches and trainer.epochs"), ("critic.warmup_steps=1", "critic")],
)
def test_simulated_engines_make_no_several_updates_and_have_no_critic(setting: str, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(CLUSTER, [setting])
    said = f"{CLUSTER}: {key}: simulated engines take the time of whole steps from [simulate]; leave it out"
    assert said in str(raised.value)


def test_values_that_no_role_reads_are_refused() -> None:
    words = ("values that no role reads", 'algorithm.advantage = "group"', 'algorithm.name = "ppo"', "remove [critic]")
    (error,) = errors(DEMO, "critic.warmup_steps=0")
    assert_says(error, *words)


def test_folder_without_a_value_head_is_refused(folder: Path) -> None:
    build(folder).save_pretrained(folder)
    (headless,) = errors(PPO, f"critic.path={folder}")
    assert_says(headless, f"critic.path {folder} holds no value head", "score.weight", "leave critic.path out")
    (empty,) = errors(PPO, f"critic.path={folder.parent}")
    assert_says(empty, f"critic.path {folder.parent} is not a model folder", "config.json")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("vocab_size", 20, "has a vocabulary of 20 ids, the policy one of 13; give a critic of the policy's tokenizer"),
        (
            "max_position_embeddings",
            32,
            "has a context of 32 tokens, the policy one of 64; give a critic with the policy's context",
        ),
    ],
)
def test_critic_of_another_model_is_refused(folder: Path, field: str, value: int, said: str) -> None:
    body = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(body | {field: value}))
    build_critic(folder, seed=1).save_pretrained(folder)
    assert errors(PPO, f"critic.path={folder}") == [f"critic.path {folder} {said}"]


def test_critic_starts_from_its_folder(folder: Path) -> None:
    model = build_critic(folder, seed=1)
    with torch.no_grad():
        model.score.weight.fill_(0.5)
    model.save_pretrained(folder)
    found = examine(load_config(PPO, [f"critic.path={folder}"]))
    assert found.errors == ()
    assert_says(" ".join(found.notes), "critic", folder, "0.14 M")
