"""Megatron critic with one rank: the same numbers as the torch critic, and refusals before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.checks import examine
from relax_actors.config import load_config
from relax_actors.config.training import CriticSection
from relax_actors.engines.megatron.backend import MegatronCriticBackend
from relax_actors.engines.torch.critic import TorchCritic
from relax_actors.errors import ConfigError
from relax_actors.weights import files as weights
from tests.conformance.base.critic_engine import policy_of, updated
from tests.support.batches import batch_of, silent
from tests.support.media_batches import media_batch
from tests.support.messages import assert_says
from tests.support.tiny_media_models import architecture_of
from tests.support.tiny_megatron import DENSE, LLAMA, MOE, config_of, skip_if_missing

skip_if_missing()

from relax_actors.engines.megatron.mcore.critic import MegatronCritic  # noqa: E402 after the check

PPO = Path(__file__).parents[2] / "examples" / "ppo" / "ppo.toml"
RANKS = ("critic.backend=megatron", "critic.megatron.ranks=2")


def test_check_names_the_ranks_and_refuses_layouts_that_cannot_work(tmp_path: Path) -> None:
    found = examine(load_config(PPO, [*RANKS, "critic.megatron.tensor_parallel=2"]))
    assert found.errors == ()
    assert "the critic has 2 ranks: tensor 2" in found.notes
    (error,) = examine(load_config(PPO, [*RANKS, "critic.megatron.pipeline_parallel=2"])).errors
    assert error.startswith("critic.megatron: ")
    assert_says(error, "num_hidden_layers = 3", "lower")
    config = config_of(tmp_path, architecture_of("qwen2_audio"), critic={"backend": "megatron"})
    body = json.loads((config.model_path / "config.json").read_text())
    (config.model_path / "config.json").write_text(json.dumps(body | {"model_type": "mystery"}))
    with pytest.raises(ConfigError) as raised:
        list(MegatronCriticBackend().check(config, config.model_path))
    assert str(raised.value).startswith("critic.backend = \"megatron\": the model's model_type is 'mystery', ")


@pytest.mark.parametrize("model_type", ["qwen3_vl", pytest.param("qwen3_omni_moe_thinker", marks=pytest.mark.slow)])
def test_a_critic_of_a_model_with_media_matches_the_torch_critic(tmp_path: Path, model_type: str) -> None:
    config = config_of(tmp_path / "run", architecture_of(model_type), trainer={"max_tokens_per_microbatch": 600})
    settings = CriticSection(learning_rate=1e-3, value_clip=0.05)
    ours, theirs = MegatronCritic(config, settings), TorchCritic(config, settings)
    policy, samples = policy_of(config, tmp_path), media_batch(config)
    for critic in (ours, theirs):
        critic.initialise(policy)
    assert ours.fingerprint() == theirs.fingerprint()
    for step in range(2):
        for critic in (ours, theirs):
            critic.accumulate(samples, silent)
        own, other = (critic.step(step, silent).metrics for critic in (ours, theirs))
        for name in other.keys() - {"micro_batches"}:
            assert own[name] == pytest.approx(other[name], abs=1e-4), name
    for found, expected in zip(ours.values(samples, silent), theirs.values(samples, silent), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    ours.export(tmp_path / "critic")
    again = MegatronCritic(config, settings.model_copy(update={"path": tmp_path / "critic"}))
    again.initialise(None)
    assert again.fingerprint() == ours.fingerprint()


@pytest.mark.parametrize("architecture", [DENSE, LLAMA, MOE], ids=["qwen3", "llama", "qwen3_moe"])
def test_five_updates_match_the_torch_critic(tmp_path: Path, architecture: dict[str, Any]) -> None:
    optimizer = {"schedule": "cosine", "warmup_steps": 2, "betas": (0.8, 0.99)}
    config = config_of(tmp_path, architecture, trainer=optimizer)
    settings = CriticSection(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, value_clip=0.05)
    ours, theirs = MegatronCritic(config, settings), TorchCritic(config, settings)
    policy = policy_of(config, tmp_path)
    for critic in (ours, theirs):
        critic.initialise(policy)
    assert ours.fingerprint() == theirs.fingerprint()
    for step in range(5):
        own, other = updated(ours, step), updated(theirs, step)
        assert own.keys() == other.keys()
        for name in other:
            assert own[name] == pytest.approx(other[name], abs=1e-4), name
        assert 0 < own["value_clipped"] < 1
        for found, expected in zip(ours.values(batch_of(9), silent), theirs.values(batch_of(9), silent), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
    for critic, folder in ((ours, tmp_path / "ours"), (theirs, tmp_path / "theirs")):
        critic.export(folder)
    own_weights, others = (weights.load([tmp_path / name / "model.safetensors"]) for name in ("ours", "theirs"))
    assert own_weights.keys() == others.keys()
    for name, tensor in others.items():
        np.testing.assert_allclose(own_weights[name], tensor, atol=5e-5, err_msg=name)
