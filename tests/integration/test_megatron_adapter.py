"""Adapters in the Megatron engine: the numbers, versions and folders of the torch engine, for every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from relax_actors.config import Config
from relax_actors.config.training import CriticSection
from relax_actors.engines.protocols import train
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.engines.torch.adapter import MARKS, run_weights
from relax_actors.engines.torch.critic import TorchCritic
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.scorer import TorchScorer
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.errors import ConfigError
from relax_actors.weights import files as weights
from tests.conformance.base.critic_engine import updated
from tests.conformance.base.training_engine import begun, folder_of
from tests.support.adapters import adapter_config, base_folder
from tests.support.batches import batch_of, batch_of_generations, routed, silent
from tests.support.models import request_of
from tests.support.text_families import MEGATRON
from tests.support.tiny_megatron import DENSE, LLAMA, MOE, ranks_of, skip_if_missing
from tests.support.trained_engines import max_difference, weights_of

skip_if_missing()

from relax_actors.engines.megatron.mcore.adapter import one_base  # noqa: E402 not before the check
from relax_actors.engines.megatron.mcore.critic import MegatronCritic  # noqa: E402 not before the check
from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 not before the check
from relax_actors.engines.megatron.mcore.scorer import MegatronScorer  # noqa: E402 not before the check

# One update is g / (|g| + 1) of AdamW, so that weights are as far apart as gradients.
SMOOTH = {"learning_rate": 1.0, "epsilon": 1.0, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 64}
KL = {"algorithm": {"kl": {"place": "loss", "coefficient": 0.1}}}
ENGINES: dict[str, Any] = {"torch": TorchEngine, "megatron": MegatronEngine}
EXPERTS = ["all-linear", "experts.gate_up_proj", "experts.down_proj"]
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all layers": (DENSE, {}),
    "untied": (LLAMA, {"rslora": True}),
    "layers besides experts": (MOE, {}),
    "experts": (MOE, {"targets": EXPERTS}),
    "down projections of experts": (MOE, {"targets": ["q_proj", "experts.down_proj"]}),
    "latent attention": (MEGATRON["deepseek_v3"], {}),
    "parts of fused layers": (DENSE, {"targets": ["q_proj", "v_proj", "up_proj"], "modules_to_save": ["norm"]}),
}


def config_of(folder: Path, base: Path, form: dict[str, Any], backend: str, **trainer: Any) -> Config:
    """Configure a run that trains an adapter, with a reference that the trainer computes."""
    return adapter_config(folder, base, form, trainer={**SMOOTH, "backend": backend, **trainer}, **KL)


def started_from(base: Path, folder: Path, form: dict[str, Any]) -> dict[str, Any]:
    """Export an adapter whose B is not zero, and return the form of a run that starts from it."""
    engine = begun(TorchEngine(config_of(folder / "first", base, form, "torch", learning_rate=0.3)))
    train(engine, batch_of(7), 0, silent)
    engine.export(exported := folder_of(folder / "exported"))
    return {"path": str(exported / "adapter")}


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_those_of_the_torch_engine(tmp_path: Path, form: str) -> None:
    architecture, lora = FORMS[form]
    base = base_folder(tmp_path, architecture)
    given = started_from(base, tmp_path, lora)
    results = []
    for backend, kind in ENGINES.items():
        config = adapter_config(tmp_path / backend, base, trainer={**SMOOTH, "backend": backend}, **KL)
        assert config.lora is not None
        engine = begun(kind(config.model_copy(update={"lora": type(config.lora).model_validate(given)})))
        first = engine.fingerprint()
        metrics = dict(train(engine, batch_of(0), 0, silent).metrics)
        results.append((first, metrics, weights_of(engine, tmp_path / f"{backend}.safetensors")))
    (first, theirs, expected), (own_first, ours, own) = results
    assert own_first == first
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert ours["kl"] == pytest.approx(0, abs=1e-6)  # the reference is the adapter of version 0
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
    assert max_difference(own, expected) < 2e-6
    assert expected.keys() >= MARKS


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [(DENSE, "all-linear"), (LLAMA, "all-linear"), (MOE, EXPERTS)],
    ids=["dense", "untied", "experts"],
)
def test_version_0_is_drawn_as_in_the_torch_engine(
    tmp_path: Path, architecture: dict[str, Any], targets: str | list[str]
) -> None:
    base, form = base_folder(tmp_path, architecture), {"modules_to_save": ["norm"], "targets": targets}
    configs = {name: config_of(tmp_path / name, base, form, name) for name in ENGINES}
    ours, theirs = (begun(ENGINES[name](config)) for name, config in configs.items())
    assert ours.fingerprint() == theirs.fingerprint()


def test_reference_routes_as_the_base_does_although_the_trainer_replays_experts(tmp_path: Path) -> None:
    base, metrics = base_folder(tmp_path, MOE), []
    for name, kind in ENGINES.items():
        # Of two parts of a step and two steps each begins with the routers of the one before.
        settings = {"router_replay": True, "max_tokens_per_microbatch": 40}
        engine = begun(kind(config_of(tmp_path / name, base, {}, name, **settings)))
        steps = [train(engine, routed(batch_of(step), step, MOE), step, silent).metrics for step in range(2)]
        metrics.append([(found["kl"], found["loss"]) for found in steps])
    np.testing.assert_allclose(metrics[1], metrics[0], rtol=1e-4, atol=1e-6)


def of_examples(batch: Sequence[TrainSample], algorithm: str) -> list[TrainSample]:
    """Make sequences those of examples, or of pairs of a chosen and a rejected answer."""
    if algorithm == "sft":
        return [sample.with_advantages(np.ones(len(sample), np.float32)) for sample in batch]
    tokens = [sum(s.trained for s in batch[i - i % 2 : i - i % 2 + 2]) for i in range(len(batch))]
    signed = [s.with_advantages(np.full(len(s), 1 - 2 * (i % 2), np.float32)) for i, s in enumerate(batch)]
    return [replace(s, row=i // 2, sample=i % 2, row_tokens=tokens[i]) for i, s in enumerate(signed)]


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_examples_and_pairs_train_the_adapter_of_the_torch_engine(tmp_path: Path, algorithm: str) -> None:
    base, results = base_folder(tmp_path, DENSE), []
    for name, kind in ENGINES.items():
        trainer = {**SMOOTH, "backend": name}
        engine = begun(kind(adapter_config(tmp_path / name, base, {}, trainer=trainer, algorithm={"name": algorithm})))
        steps = [train(engine, of_examples(batch_of(step), algorithm), step, silent).metrics for step in range(2)]
        results.append(([found["loss"] for found in steps], weights_of(engine, tmp_path / f"{name}.safetensors")))
    (theirs, expected), (ours, own) = results
    assert theirs[0] != pytest.approx(theirs[1], rel=1e-3)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert max_difference(own, expected) < 5e-5


def test_nodes_with_other_bases_are_refused_by_name() -> None:
    assert one_base({"a": "5d0c", "b": "5d0c"}) == "5d0c"
    with pytest.raises(ConfigError, match=r"91fa on node b, and 5d0c on node a: .*copy"):
        one_base({"a": "5d0c", "b": "91fa"})


def test_a_version_is_read_and_exported_as_one_of_the_torch_engine(tmp_path: Path) -> None:
    base = base_folder(tmp_path, DENSE)
    form = {"modules_to_save": ["norm"], "export_merged": True}
    config = config_of(tmp_path / "run", base, form, "megatron")
    engine, path = begun(MegatronEngine(config)), tmp_path / "1.safetensors"
    train(engine, batch_of(0), 0, silent)
    fingerprint = engine.publish(path)
    scorers = [TorchScorer(config), MegatronScorer(config)]
    rollout = TransformersEngine(base, weights=partial(run_weights, config))
    for consumer in (*scorers, rollout):
        consumer.load(1, fingerprint, [path])
    request = request_of("12>", 3)
    (samples,) = rollout.generate([request], silent)
    batch = batch_of_generations([(request, sample) for sample in samples])
    for mine, sample, item in zip(engine.score(batch, silent), samples, batch, strict=True):
        np.testing.assert_allclose(mine[item.loss_mask], sample.logprobs, atol=1e-5)
    for scorer in scorers:
        for mine, theirs in zip(engine.score(batch_of(9), silent), scorer.score(batch_of(9), silent), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    engine.export(folder := folder_of(tmp_path / "model"))
    again = begun(TorchEngine(config_of(tmp_path / "torch", base, form, "torch")))
    written, published = (weights.load([f]) for f in (folder / "adapter" / "adapter_model.safetensors", path))
    assert written.keys() == {f"base_model.model.{name}" for name in published if name not in MARKS}
    again.export(other := folder_of(tmp_path / "other"))
    configs = [(found / "adapter" / "adapter_config.json").read_text() for found in (folder, other)]
    assert configs[0] == configs[1]
    merged = TorchScorer(adapter_config(tmp_path / "merged", base).model_copy(update={"lora": None}))
    merged.load(1, weights.fingerprint(weights.load([folder / "model.safetensors"])), [folder / "model.safetensors"])
    for mine, theirs in zip(engine.score(batch_of(9), silent), merged.score(batch_of(9), silent), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_adapter_is_not_resumed_over_another_base_or_scale(tmp_path: Path) -> None:
    base = base_folder(tmp_path, DENSE)
    engine = begun(MegatronEngine(config_of(tmp_path / "run", base, {}, "megatron")))
    engine.save(folder := folder_of(tmp_path / "checkpoint"))
    another = base_folder(tmp_path / "another", DENSE, seed=8)
    with pytest.raises(ConfigError, match="belongs to the base with fingerprint"):
        MegatronEngine(config_of(tmp_path / "run", another, {}, "megatron")).load(folder)
    with pytest.raises(ConfigError, match="was trained with scale"):
        MegatronEngine(config_of(tmp_path / "run", base, {"alpha": 3.0}, "megatron")).load(folder)


def test_dropped_inputs_follow_from_seed_and_update(tmp_path: Path) -> None:
    base, folder = base_folder(tmp_path, DENSE), folder_of(tmp_path / "checkpoint")

    def trained(dropout: float, recompute: str = "none", *, resumes: bool = False) -> tuple[str, dict[str, Tensor]]:
        config = config_of(tmp_path / "run", base, {"dropout": dropout}, "megatron", recompute=recompute)
        engine = begun(MegatronEngine(config))
        train(engine, batch_of(0), 0, silent)
        if resumes:
            engine.save(folder)
            engine = MegatronEngine(config)
            engine.load(folder)
        train(engine, batch_of(1), 1, silent)
        return engine.fingerprint(), weights_of(engine, tmp_path / "weights.safetensors")

    dropped = trained(0.3)
    assert dropped[0] == trained(0.3, resumes=True)[0]
    # megatron-core sums gradients in another order where layers are computed again.
    assert max_difference(dropped[1], trained(0.3, "full")[1]) < 1e-5
    assert max_difference(dropped[1], trained(0.0)[1]) > 1e-3


def test_critic_trains_the_adapter_and_the_head_of_the_torch_critic(tmp_path: Path) -> None:
    base = base_folder(tmp_path, DENSE)
    config = config_of(tmp_path / "run", base, {}, "torch")
    begun(TorchEngine(config)).publish(policy := tmp_path / "0.safetensors")
    results: list[tuple[list[dict[str, float]], dict[str, Tensor]]] = []
    for kind in (TorchCritic, MegatronCritic):
        settings = CriticSection(learning_rate=1e-2, value_clip=0)
        critic: Any = kind(config, settings)
        critic.initialise([policy])
        metrics = [dict(updated(critic, step)) for step in range(2)]
        critic.save(folder := folder_of(tmp_path / f"{kind.__name__}.checkpoint"))
        again: Any = kind(config, settings)
        again.load(folder)
        assert again.fingerprint() == critic.fingerprint()
        assert dict(updated(again, 2)) == dict(updated(critic, 2))
        critic.export(exported := folder_of(tmp_path / kind.__name__))
        results.append((metrics, weights.load(sorted(exported.glob("*.safetensors")))))
    for theirs, ours in zip(results[0][0], results[1][0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert max_difference(results[0][1], results[1][1]) < 5e-5


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2": (DENSE, {"tensor_parallel": 2}),
    "tp2_sp": (DENSE, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (DENSE, {"pipeline_parallel": 2}),
    "cp2": (DENSE, {"context_parallel": 2}),
    "ep2": (MOE, {"expert_parallel": 2}),
    "ep2_experts": (MOE, {"expert_parallel": 2}),
    "tp2_ep2_experts": (
        MOE,
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "expert_tensor_parallel": 1},
    ),
    "tp2_latent": (MEGATRON["deepseek_v3"], {"tensor_parallel": 2, "sequence_parallel": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_the_adapter_of_one_process(tmp_path: Path, layout: str) -> None:
    architecture, section = LAYOUTS[layout]
    base = base_folder(tmp_path, architecture)
    targets = EXPERTS if layout.endswith("experts") else "all-linear"
    form = {"modules_to_save": ["norm"], "export_merged": True, "targets": targets}
    smooth = {"learning_rate": 1e-2, "epsilon": 1e-3, "max_grad_norm": 1.0}
    alone = begun(MegatronEngine(config_of(tmp_path / "alone", base, form, "megatron", **smooth)))
    group = TrainerGroup(
        config_of(tmp_path / "ranks", base, form, "megatron", **smooth, **ranks_of(section)), lambda *_: None
    )
    try:
        begun(group)
        assert group.fingerprint() == alone.fingerprint()
        for step in range(3):
            ours, theirs = (train(engine, batch_of(step), step, silent).metrics for engine in (group, alone))
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert ours["kl"] == pytest.approx(theirs["kl"], rel=1e-4, abs=1e-5)
        group.save(folder := folder_of(tmp_path / "checkpoint"))
        at = group.fingerprint()
        paths = [tmp_path / f"ranks.{number}" for number in range(group.shards)]
        assert group.publish(*paths) == at
        found = weights.load(paths)
        assert max_difference(found, weights_of(alone, tmp_path / "alone.safetensors")) < 5e-5
        exported = []
        for engine, name in ((group, "model"), (alone, "other")):
            engine.export(target := folder_of(tmp_path / name))
            exported.append(weights.load(sorted(target.rglob("*.safetensors"))))
        assert max_difference(*exported) < 5e-5
        alone.load(folder)  # any layout goes on from the checkpoint of any other
        assert alone.fingerprint() == at
        train(group, batch_of(3), 3, silent)
        last = group.fingerprint()
        group.load(folder)
        train(group, batch_of(3), 3, silent)
        assert group.fingerprint() == last
    finally:
        group.close()
