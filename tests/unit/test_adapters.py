"""The torch engines with an adapter: what is trained, published, served, and what the reference is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_actors.config import Config
from relax_actors.config.training import CriticSection
from relax_actors.data.adapter import form_of
from relax_actors.engines.protocols import train
from relax_actors.engines.sglang.merged_adapter import MergedAdapter
from relax_actors.engines.sglang.weight_loaders import to_checkpoint_names
from relax_actors.engines.torch.adapter import MARKS, Adapter, run_weights
from relax_actors.engines.torch.critic import TorchCritic
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import build, copy_into, read_folder
from relax_actors.engines.torch.scorer import TorchScorer
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.errors import ConfigError
from relax_actors.replay.branch import fixed_of
from relax_actors.supervision.resume import compare
from relax_actors.weights import files as weights
from tests.conformance.base.training_engine import begun, folder_of
from tests.support.adapters import adapter_config, base_folder
from tests.support.batches import batch_of, batch_of_generations, silent, valued
from tests.support.models import QWEN3, ReferenceModel, qwen3_moe, request_of

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
KL = {"algorithm": {"kl": {"place": "loss", "coefficient": 0.1}}}


EXPERTS = ["all-linear", "experts.gate_up_proj", "experts.down_proj"]
of_both_kinds = pytest.mark.parametrize(
    ("base", "targets"),
    [(QWEN3, "all-linear"), (qwen3_moe(QWEN3), EXPERTS)],
    indirect=["base"],
    ids=["dense", "experts"],
)


@pytest.fixture
def base(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Folder of a base, whose file holds the matrices of experts apart, as those of the hub."""
    folder = base_folder(tmp_path, getattr(request, "param", QWEN3))
    file = folder / "model.safetensors"
    weights.save(to_checkpoint_names(dict(weights.load([file]))), file)
    return folder


def rollout_of(config: Config) -> TransformersEngine:
    """Engine that generates with the adapter of a run."""
    return TransformersEngine(config.model_path, weights=partial(run_weights, config))


def stepped(config: Config, steps: int = 1) -> TorchEngine:
    """Engine after some steps."""
    engine = begun(TorchEngine(config))
    for step in range(steps):
        train(engine, batch_of(step), step, silent)
    return engine


def test_a_step_changes_the_adapter_and_no_weight_of_the_base(tmp_path: Path, base: Path) -> None:
    engine = stepped(adapter_config(tmp_path / "run", base))
    stored = read_folder(engine.model, base)
    own = engine.model.state_dict()
    changed = {name for name, tensor in stored.items() if not torch.equal(own[name], tensor)}
    assert not changed
    published = tmp_path / "adapter.safetensors"
    engine.publish(published)
    tensors = weights.load([published])
    ups = [name for name in tensors if name.endswith("lora_B.weight")]
    assert len(ups) == 14
    assert all(tensors[name].abs().sum() > 0 for name in ups)
    assert not tensors.keys() & stored.keys()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@of_both_kinds
def test_log_probs_of_every_engine_move_with_the_adapter_and_are_the_trainers(
    tmp_path: Path, base: Path, targets: str | list[str], precision: str
) -> None:
    config = adapter_config(tmp_path / "run", base, {"targets": targets}, trainer={"precision": precision})
    engine, rollout, scorer = begun(TorchEngine(config)), rollout_of(config), TorchScorer(config)
    request, found, rounding = request_of("12>", 3), [], 1e-5 if precision == "float32" else 0.05
    for version in (0, 1):
        path = tmp_path / f"{version}.safetensors"
        fingerprint = engine.publish(path)
        rollout.load(version, fingerprint, [path])
        scorer.load(version, fingerprint, [path])
        (samples,) = rollout.generate([request], silent)
        batch = batch_of_generations([(request, sample) for sample in samples])
        scored = engine.score(batch, silent)
        for mine, sample, item in zip(scored, samples, batch, strict=True):
            np.testing.assert_allclose(mine[item.loss_mask], sample.logprobs, atol=rounding)
        for mine, theirs in zip(scored, scorer.score(batch, silent), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6 if precision == "float32" else rounding)
        found.append(np.concatenate(scorer.score(batch_of(9), silent)))
        train(engine, batch_of(version), version, silent)
    assert np.abs(found[0] - found[1]).max() > 10 * rounding


def test_version_zero_computes_what_the_base_computes(tmp_path: Path, base: Path) -> None:
    config = adapter_config(tmp_path / "run", base)
    rollout, path = rollout_of(config), tmp_path / "0.safetensors"
    rollout.load(0, begun(TorchEngine(config)).publish(path), [path])
    request = request_of("9081>", 1)
    plain = ReferenceModel(config, read_folder(build(base), base))
    for sample in rollout.generate([request], silent)[0]:
        np.testing.assert_allclose(sample.logprobs, plain.logprobs(request, sample), atol=1e-5)


def test_adapter_is_not_loaded_over_another_base(tmp_path: Path, base: Path) -> None:
    engine, path = stepped(adapter_config(tmp_path / "run", base)), tmp_path / "1.safetensors"
    fingerprint = engine.publish(path)
    other = adapter_config(tmp_path / "other", base_folder(tmp_path / "another", seed=8))
    with pytest.raises(ConfigError, match=r"version 1 .*base with fingerprint .*; restore"):
        rollout_of(other).load(1, fingerprint, [path])
    engine.save(folder := folder_of(tmp_path / "checkpoint"))
    with pytest.raises(ConfigError, match="belongs to the base with fingerprint"):
        TorchEngine(other).load(folder)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", [{"alpha": 16.0}, {"rslora": True}], ids=["alpha", "rslora"])
def test_adapter_is_not_loaded_with_another_scale(
    tmp_path: Path, base: Path, form: dict[str, Any], precision: str
) -> None:
    trainer, path = {"precision": precision}, tmp_path / "1.safetensors"
    engine = stepped(adapter_config(tmp_path / "run", base, {"rank": 5}, trainer=trainer))
    fingerprint = engine.publish(path)
    rollout_of(adapter_config(tmp_path / "same", base, {"rank": 5}, trainer=trainer)).load(1, fingerprint, [path])
    other = adapter_config(tmp_path / "other", base, {"rank": 5} | form, trainer=trainer)
    with pytest.raises(ConfigError, match=r"version 1 .*scale 6\.4.*; restore"):
        rollout_of(other).load(1, fingerprint, [path])
    assert other.lora is not None
    with pytest.raises(ConfigError, match="version 1 was trained with scale"):
        MergedAdapter(base, form_of(other.lora), torch.float32).full_set(1, weights.load([path]))
    engine.save(folder := folder_of(tmp_path / "checkpoint"))
    with pytest.raises(ConfigError, match="was trained with scale"):
        TorchEngine(other).load(folder)


def test_branch_cannot_change_the_adapter(tmp_path: Path, base: Path) -> None:
    config = adapter_config(tmp_path, base)
    for form in ({"alpha": 16.0}, {"rank": 2}, {"rslora": True}):
        assert fixed_of(change.key for change in compare(config, adapter_config(tmp_path, base, form)))
    without = config.model_copy(update={"lora": None})
    assert fixed_of(change.key for change in compare(config, without)) == ["lora"]
    assert not fixed_of(["trainer.learning_rate"])


def test_weights_in_training_are_published_while_the_model_computes_the_reference(tmp_path: Path, base: Path) -> None:
    config = adapter_config(tmp_path / "run", base, {"modules_to_save": ["norm"]})
    model = build(base)
    adapter = run_weights(config, model)
    assert isinstance(adapter, Adapter)
    adapter.initialise(1)
    adapter.keep_first()
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        first = model(tokens).logits
        for parameter in adapter.parameters().values():
            parameter.add_(0.25)
        trained, published = model(tokens).logits, {name: t.clone() for name, t in adapter.tensors().items()}
        with adapter.as_reference():
            torch.testing.assert_close(model(tokens).logits, first, rtol=0, atol=0)
            during = adapter.tensors()
        torch.testing.assert_close(model(tokens).logits, trained, rtol=0, atol=0)
    assert not torch.equal(first, trained)
    assert [name for name, tensor in published.items() if torch.equal(during[name], tensor)] == list(during)


def test_model_without_linear_layers_has_no_adapter(tmp_path: Path) -> None:
    folder = base_folder(tmp_path, GPT2)
    config = adapter_config(tmp_path / "run", folder)
    with pytest.raises(ConfigError, match=r'lora.targets = "all-linear" matches nothing'):
        run_weights(config, build(folder))


def test_adapter_of_another_rank_is_not_loaded(tmp_path: Path, base: Path) -> None:
    path = tmp_path / "1.safetensors"
    fingerprint = stepped(adapter_config(tmp_path / "run", base)).publish(path)
    with pytest.raises(ConfigError, match=r"lora_A.weight has shape \[4, .*\], not \[2"):
        rollout_of(adapter_config(tmp_path / "other", base, {"rank": 2})).load(1, fingerprint, [path])


def test_checkpoint_holds_the_adapter_alone(tmp_path: Path, base: Path) -> None:
    engine = stepped(adapter_config(tmp_path / "run", base, **KL))
    engine.save(folder := folder_of(tmp_path / "checkpoint"))
    saved = weights.load([folder / "model.safetensors"])
    assert saved.keys() >= MARKS
    assert all("lora_" in name for name in saved.keys() - MARKS)
    assert not (folder / "reference.safetensors").exists()  # the reference is the base alone
    assert sum(file.stat().st_size for file in folder.iterdir()) < (base / "model.safetensors").stat().st_size * 3


@pytest.mark.parametrize("form", [{}, {"modules_to_save": ["norm"]}], ids=["adapter", "with a norm"])
def test_reference_is_the_base_with_the_adapter_off_also_after_a_checkpoint(
    tmp_path: Path, base: Path, form: dict[str, Any]
) -> None:
    config = adapter_config(tmp_path / "run", base, form, **KL)
    scorer, path = TorchScorer(config), tmp_path / "0.safetensors"
    scorer.load(0, begun(TorchEngine(config)).publish(path), [path])
    engine, given = stepped(config), batch_of(4)
    engine.save(folder := folder_of(tmp_path / "checkpoint"))
    resumed = TorchEngine(config)
    resumed.load(folder)
    scored = scorer.score(given, silent)
    expected = [replace(s, reference_logprobs=found) for s, found in zip(given, scored, strict=True)]
    metrics = [train(engine, expected, 1, silent).metrics, train(resumed, given, 1, silent).metrics]
    assert metrics[0]["kl"] > 1e-4
    np.testing.assert_allclose(metrics[0]["kl"], metrics[1]["kl"], rtol=1e-4)
    assert engine.fingerprint() == resumed.fingerprint()


def test_dropped_inputs_follow_from_seed_and_update(tmp_path: Path, base: Path) -> None:
    def fingerprints(dropout: float, seed: int = 5, recompute: str = "none") -> list[str]:
        sections = {"run": {"seed": seed}, "trainer": {"recompute": recompute}}
        engine = begun(TorchEngine(adapter_config(tmp_path / "run", base, {"dropout": dropout}, **sections)))
        found = []
        for step in range(2):
            train(engine, batch_of(0), step, silent)
            found.append(engine.fingerprint())
        return found

    dropped = fingerprints(0.3)
    assert dropped == fingerprints(0.3)
    assert dropped == fingerprints(0.3, recompute="full")
    assert dropped[0] != fingerprints(0.0)[0]
    assert dropped[0] != fingerprints(0.3, seed=6)[0]


def test_scores_are_computed_without_dropped_inputs(tmp_path: Path, base: Path) -> None:
    with_dropout = stepped(adapter_config(tmp_path / "run", base, {"dropout": 0.3}))
    path = tmp_path / "1.safetensors"
    fingerprint = with_dropout.publish(path)
    scorer = TorchScorer(adapter_config(tmp_path / "run", base))
    scorer.load(1, fingerprint, [path])
    for mine, theirs in zip(with_dropout.score(batch_of(9), silent), scorer.score(batch_of(9), silent), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@of_both_kinds
def test_critic_has_an_adapter_of_its_own(tmp_path: Path, base: Path, targets: str | list[str]) -> None:
    config = adapter_config(tmp_path / "run", base, {"targets": targets})
    policy = tmp_path / "0.safetensors"
    begun(TorchEngine(config)).publish(policy)
    settings = CriticSection(learning_rate=1e-3, value_clip=0)
    critic = TorchCritic(config, settings)
    critic.initialise([policy])
    batch = valued(batch_of(0), 1)
    assert not np.concatenate(critic.values(batch, silent)).any()  # the head is zero
    losses = []
    for step in range(9):
        critic.accumulate(batch, silent)
        losses.append(critic.step(step, silent).metrics["value_loss"])
    assert losses[-1] < losses[0]
    critic.save(folder := folder_of(tmp_path / "checkpoint"))
    saved = weights.load([folder / "model.safetensors"])
    assert {name for name in saved if "lora_" not in name} == {*MARKS, "score.weight", "score.bias"}
    again = TorchCritic(config, settings)
    again.load(folder)
    assert again.fingerprint() == critic.fingerprint()
    critic.export(exported := folder_of(tmp_path / "critic"))
    whole = TorchCritic(config.model_copy(update={"lora": None}), CriticSection(path=exported))
    whole.initialise(None)
    for mine, theirs in zip(critic.values(batch, silent), whole.values(batch, silent), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@of_both_kinds
def test_merged_model_has_the_log_probs_of_the_adapter(tmp_path: Path, base: Path, targets: str | list[str]) -> None:
    engine = stepped(adapter_config(tmp_path / "run", base, {"targets": targets, "export_merged": True}))
    engine.export(folder := folder_of(tmp_path / "model"))
    config = adapter_config(tmp_path / "other", base).model_copy(update={"lora": None})
    scorer = TorchScorer(config, path=None)
    copy_into(scorer.model, read_folder(build(folder), folder), "merged")
    path = tmp_path / "merged.safetensors"
    weights.save(read_folder(scorer.model, folder), path)
    scorer.load(1, weights.fingerprint(weights.load([path])), [path])
    for mine, theirs in zip(engine.score(batch_of(3), silent), scorer.score(batch_of(3), silent), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@of_both_kinds
def test_full_sets_for_servers_are_those_of_the_merged_model(
    tmp_path: Path, base: Path, targets: str | list[str]
) -> None:
    form = {"targets": targets, "modules_to_save": ["norm"], "export_merged": True}
    config = adapter_config(tmp_path / "run", base, form)
    engine, path = stepped(config), tmp_path / "1.safetensors"
    engine.publish(path)
    engine.export(folder := folder_of(tmp_path / "model"))
    assert config.lora is not None
    maker = MergedAdapter(base, form_of(config.lora), torch.float32)
    full, exported = maker.full_set(1, weights.load([path])), weights.load([folder / "model.safetensors"])
    assert weights.fingerprint(full) == weights.fingerprint(exported)
    other = MergedAdapter(base_folder(tmp_path / "another", seed=8), form_of(config.lora), torch.float32)
    with pytest.raises(ConfigError, match=r"version 1 .*base with fingerprint"):
        other.full_set(1, weights.load([path]))
