"""Training of multimodal models: any cut into micro-batches, frozen towers, export, critic, budgets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForMultimodalLM

from broker.store import Store
from relax_actors.config import Config
from relax_actors.config.training import CriticSection
from relax_actors.data.checked_run import CheckedModel
from relax_actors.data.model_folder import measure
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.protocols.samples import input_lengths, plan_micro_batches
from relax_actors.engines.torch.critic import TorchCritic
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.engines.torch.stored_weights import fingerprint_of
from relax_actors.errors import ConfigError
from relax_actors.roles.critic_check import check_critic
from relax_actors.training.warm_start import warm_start
from relax_actors.weights import files as weights
from tests.support.batches import silent
from tests.support.media_batches import media_batch
from tests.support.models import QWEN3, config_of, publish
from tests.support.tiny_media_models import FAMILIES, architecture_of

DEEP = ["qwen3_vl", "qwen3_omni_moe_thinker"]
"""Families with features that are added in several layers."""
RENAMED = ["qwen2_5_vl", "qwen3_omni_moe_thinker", "qwen2_audio"]
"""Families whose files have other names than the weights in memory."""


def slow(name: str) -> Any:
    """Mark a family whose test adds little to those of the others."""
    return pytest.param(name, marks=pytest.mark.slow)


def begun(folder: Path, model_type: str, **trainer: Any) -> tuple[TorchEngine, Config]:
    """Return an engine at version 0, and its configuration."""
    settings = {"learning_rate": 1e-2, "max_tokens_per_microbatch": 2000} | trainer
    kl = {"kl": {"place": "loss", "coefficient": 0.1, "kind": "k3"}, "entropy": {"coefficient": 0.01}}
    config = config_of(folder, architecture_of(model_type), trainer=settings, algorithm=kl)
    engine = TorchEngine(config)
    engine.initialise(5)
    engine.finish_warm_start()
    return engine, config


def samples_of(engine: TorchEngine, config: Config) -> list[TrainSample]:
    """Make two samples of each of some prompts, with and without media."""
    return media_batch(config, model=engine.model)


def step_of(engine: TorchEngine, parts: list[list[TrainSample]]) -> tuple[float, torch.Tensor]:
    """Return the loss of a step and its gradient."""
    captured: list[torch.Tensor] = []

    def capture(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            captured.extend(p.grad.flatten().clone() for p in group["params"] if p.grad is not None)

    hook = register_optimizer_step_pre_hook(capture)
    try:
        for part in parts:
            engine.accumulate(part, silent)
        loss = engine.step(0, silent).metrics["loss"]
    finally:
        hook.remove()
    return float(loss), torch.cat(captured)


@pytest.mark.parametrize("model_type", DEEP)
def test_loss_and_gradient_do_not_depend_on_the_cut(tmp_path: Path, model_type: str) -> None:
    whole, config = begun(tmp_path, model_type)
    samples = samples_of(whole, config)
    loss, gradient = step_of(whole, [samples])
    longest = max(len(sample) for sample in samples)
    cut, _ = begun(tmp_path, model_type, max_tokens_per_microbatch=longest)
    rows = [[sample for sample in samples if sample.row == row] for row in range(3)]
    other, cut_gradient = step_of(cut, rows)
    assert len(plan_micro_batches(rows[1], longest, share_prefixes=True)) == 2
    assert other == pytest.approx(loss, rel=1e-5)
    assert float((cut_gradient - gradient).abs().max()) <= 1e-5 * max(1.0, float(gradient.abs().max()))


def test_frozen_towers_stay_and_have_no_optimizer_state(tmp_path: Path) -> None:
    engine, config = begun(tmp_path / "run", "qwen2_5_omni_thinker", freeze=["visual.*", "audio_tower.*"])
    engine.publish(tmp_path / "before")
    train(engine, samples_of(engine, config), 0, silent)
    engine.publish(tmp_path / "after")
    before, after = (weights.load([tmp_path / name]) for name in ("before", "after"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not any(name.startswith(("visual.", "audio_tower.")) for name in moved)
    towers = sum(name.startswith(("visual.", "audio_tower.")) for name in before)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    engine.save(folder)
    state = weights.load([folder / "optimizer.safetensors"])
    assert len({key.partition(".")[0] for key in state}) <= len(before) - towers


def test_training_resumes_exactly_after_a_step_without_media(tmp_path: Path) -> None:
    engine, config = begun(tmp_path / "run", "qwen2_5_omni_thinker", weight_decay=0.1)
    samples, other = media_batch(config), TorchEngine(config)
    text = [sample for sample in samples if sample.media is not None and not sample.media.items]
    train(engine, text, 0, silent)
    (folder := tmp_path / "checkpoint").mkdir()
    engine.save(folder)
    other.load(folder)
    for step in (1, 2):
        assert train(other, samples, step, silent).metrics == train(engine, samples, step, silent).metrics
    assert other.fingerprint() == engine.fingerprint()


def test_a_pattern_without_a_weight_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.freeze: '\*vision_tower\*' matches no weight of the model; it has"
    ):
        begun(tmp_path, "qwen3_vl", freeze=["*vision_tower*"])


@pytest.mark.parametrize("model_type", [name if name in RENAMED else slow(name) for name in FAMILIES])
def test_the_exported_folder_loads_with_the_auto_class_and_starts_another_run(tmp_path: Path, model_type: str) -> None:
    engine, config = begun(tmp_path / "run", model_type)
    train(engine, samples_of(engine, config), 0, silent)
    folder = tmp_path / "model"
    engine.export(folder)
    loaded = AutoModelForMultimodalLM.from_pretrained(folder)
    assert weights.fingerprint(tensors_of(loaded)) == engine.fingerprint()
    assert fingerprint_of(folder) == engine.fingerprint()
    section = config.model.model_copy(update={"path": folder, "architecture": None, "tokenizer": None})
    other = TorchEngine(config.model_copy(update={"model": section}))
    other.initialise(9)
    assert other.fingerprint() == engine.fingerprint()


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen2_audio"])
def test_a_critic_reads_media_and_its_folder_starts_another(tmp_path: Path, model_type: str) -> None:
    engine, config = begun(tmp_path / "run", model_type)
    samples = samples_of(engine, config)
    critic = TorchCritic(config, CriticSection(learning_rate=1e-2))
    critic.initialise(publish(tensors_of(engine.model), tmp_path / "policy")[1])
    assert not any(values.any() for values in critic.values(samples, silent))
    for step in range(2):
        critic.accumulate(samples, silent)
        critic.step(step, silent)
    together = critic.values(samples, silent)
    assert all(values[sample.loss_mask].all() for values, sample in zip(together, samples, strict=True))
    for sample, values in zip(samples, together, strict=True):
        np.testing.assert_allclose(critic.values([sample], silent)[0], values, atol=1e-5)
    critic.export(tmp_path / "critic")
    other = TorchCritic(config, CriticSection(path=tmp_path / "critic"))
    other.initialise(None)
    assert other.fingerprint() == critic.fingerprint()


@pytest.mark.parametrize("model_type", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def test_a_critic_starts_with_all_weights_of_the_policy_but_the_head(tmp_path: Path, model_type: str) -> None:
    config = config_of(tmp_path, architecture_of(model_type))
    policy, critic = tensors_of(build(config.model_path, seed=3)), TorchCritic(config, CriticSection())
    critic.initialise(publish(policy, tmp_path / "policy")[1])
    critic.export(tmp_path / "critic")
    own = weights.load([tmp_path / "critic" / "model.safetensors"])
    assert [name for name in own if name not in policy or not torch.equal(own[name], policy[name])] == [
        "lm_head.weight"
    ]


def test_a_critic_of_another_family_is_refused(tmp_path: Path) -> None:
    config, text = config_of(tmp_path / "run", architecture_of("qwen3_vl")), config_of(tmp_path / "text", QWEN3)
    section = CriticSection(path=tmp_path / "critic")
    for other, said in ((config, ""), (text, "holds a model of text alone, and the policy is one of type qwen3_vl")):
        critic = TorchCritic(other, CriticSection())
        critic.initialise(publish(tensors_of(build(other.model_path, seed=3)), tmp_path / "policy")[1])
        critic.export(tmp_path / "critic")
        checked = config.model_copy(update={"critic": section})
        policy = CheckedModel(config.model_path, measure(other.model_path), Tokenizer(config.model_path))
        if not said:
            assert list(check_critic(section, checked, policy))
            continue
        with pytest.raises(ConfigError, match=f"^critic.path {tmp_path / 'critic'} {said}"):
            list(check_critic(section, checked, policy))


def test_media_count_once_for_the_samples_of_a_row_in_a_micro_batch(tmp_path: Path) -> None:
    engine, config = begun(tmp_path, "qwen3_vl")
    samples = samples_of(engine, config)
    tokens, media = sum(input_lengths(samples)), sum(sample.media.tokens for sample in samples[::2] if sample.media)
    assert media > 0
    plans = plan_micro_batches(samples, tokens + media, share_prefixes=True)
    # Behind a prefix, all trained tokens count.
    computed = tokens - sum(plans[0].shared) + np.count_nonzero(plans[0].shared)
    assert computed < tokens
    for shares, least in ((True, computed), (False, tokens)):
        assert len(plan_micro_batches(samples, least + media, share_prefixes=shares)) == 1
        assert len(plan_micro_batches(samples, least + media - 1, share_prefixes=shares)) == 2
    without = [replace(sample, media=None) for sample in samples]
    assert len(plan_micro_batches(without, tokens, share_prefixes=False)) == 1


def test_a_warm_start_skips_answers_that_the_model_can_never_give(tmp_path: Path) -> None:
    rows = [{"prompt": "1>", "answer": "<|image_pad|>"}, {"prompt": "2>", "answer": "2"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(
        tmp_path / "run",
        architecture_of("qwen3_vl"),
        data={"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "function": None},
        trainer={"warm_start": {"steps": 2, "rows": 4, "learning_rate": 1e-3}},
    )
    engine = TorchEngine(config)
    engine.initialise(5)
    assert math.isfinite(warm_start(config, engine, silent, Store(tmp_path / "store")))
