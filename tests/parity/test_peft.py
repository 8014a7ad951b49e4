"""Adapters against PEFT: loss, gradients and updates are the same, and each reads the folder of the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from relax_actors.data.adapter import DOWN, PREFIX, UP
from relax_actors.data.adapter_check import check_adapter
from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.peft_tensors import to_peft
from relax_actors.errors import ConfigError
from tests.conformance.base.training_engine import begun, folder_of
from tests.support.adapters import adapter_config, base_folder
from tests.support.batches import batch_of, silent
from tests.support.models import QWEN3
from tests.support.tiny_megatron import MOE

peft = pytest.importorskip("peft", reason="needs the extra parity")

EXPERTS = {"targets": ["all-linear", "experts.gate_up_proj", "experts.down_proj"]}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all linear layers": (QWEN3, {}),
    "rsLoRA of two layers": (QWEN3, {"rslora": True, "targets": ["q_proj", "model.layers.1.mlp.*"], "alpha": 7.0}),
    "a norm, too": (QWEN3, {"targets": ["q_proj", "v_proj"], "modules_to_save": ["norm"]}),
    "experts": (MOE, EXPERTS),
    "down projections of experts": (MOE, {"targets": ["*.layers.1.mlp.experts.down_proj"]}),
}
SFT = {"algorithm": {"name": "sft"}}


def examples(seed: int) -> list[TrainSample]:
    """Sequences whose completions are learnt."""
    return [s.with_advantages(np.ones(len(s), np.float32)) for s in batch_of(seed)]


def trained_engine(
    tmp_path: Path, form: dict[str, Any], steps: int = 2, architecture: dict[str, Any] = QWEN3
) -> tuple[TorchEngine, Path, Path]:
    """Engine after some steps, so that B is not zero; the folder of the base, and the exported one of the adapter."""
    base = base_folder(tmp_path, architecture)
    trainer = {"max_grad_norm": 1e9, "learning_rate": 1e-2}
    engine = begun(TorchEngine(adapter_config(tmp_path / "run", base, form, trainer=trainer, **SFT)))
    for step in range(steps):
        train(engine, examples(step), step, silent)
    engine.export(folder := folder_of(tmp_path / "model"))
    return engine, base, folder / "adapter"


def peft_model(base: Path, adapter: Path) -> Any:
    """The adapter in PEFT, trainable."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)


def mean_loss(model: Any, batch: list[TrainSample]) -> Tensor:
    """Negative log-prob of the trained tokens, averaged over them."""
    terms = []
    for sample in batch:
        tokens = torch.from_numpy(sample.token_ids).long()
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        terms.append(-logprobs[torch.from_numpy(sample.loss_mask[1:])])
    return torch.cat(terms).mean()


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients of the trained parameters by the names of PEFT's files, without `PREFIX`."""
    given = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    ours = {re.sub(r"\.slots(\.\w+_proj)?\.policy\.", r"\1.", name): gradient for name, gradient in given.items()}
    ours = {re.sub(r"\.down$", DOWN, re.sub(r"\.up$", UP, name)): gradient for name, gradient in ours.items()}
    is_ours = not any(name.startswith(PREFIX) for name in given)
    named = to_peft(ours) if is_ours else given
    ends = {".modules_to_save.default.": ".", ".default.weight": ".weight"}
    return {_plain(name.removeprefix(PREFIX), ends): gradient for name, gradient in named.items()}


def _plain(name: str, ends: dict[str, str]) -> str:
    for theirs, ours in ends.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("form", FORMS)
def test_loss_gradient_and_updates_are_those_of_peft(tmp_path: Path, form: str) -> None:
    architecture, lora = FORMS[form]
    engine, base, folder = trained_engine(tmp_path, lora, architecture=architecture)
    theirs = peft_model(base, folder)
    batch = examples(9)
    loss = mean_loss(theirs, batch)
    loss.backward()
    expected = gradients(theirs)
    engine.accumulate(batch, silent)
    tokens = sum(sample.trained for sample in batch)
    found = {name: gradient / tokens for name, gradient in gradients(engine.model).items()}
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * largest, rtol=1e-5)
    metrics = engine.step(2, silent).metrics
    np.testing.assert_allclose(metrics["loss"], float(loss.detach()), rtol=1e-5)
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    np.testing.assert_allclose(metrics["grad_norm"], float(norm), rtol=1e-5)


def test_an_adapter_of_peft_is_the_start_of_a_run(tmp_path: Path) -> None:
    base = base_folder(tmp_path)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=r".*layers\.1.*proj", use_rslora=True, lora_dropout=0.2)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    theirs.save_pretrained(tmp_path / "adapter")
    ours = adapter_config(tmp_path / "run", base)
    section = {"path": str(tmp_path / "adapter")}
    ours = ours.model_copy(update={"lora": type(ours.lora).model_validate(section)})
    (note,) = check_adapter(ours, base)
    assert "rank 3" in note
    assert "7 of 14 linear layers" in note
    engine = begun(TorchEngine(ours))
    batch = batch_of(3)
    expected = np.array([float(mean_loss(theirs.eval(), [s]).detach()) * s.trained for s in batch])
    found = np.array([-scored.sum() for scored in engine.score(batch, silent)])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "form"), [(QWEN3, {"modules_to_save": ["norm"]}), (MOE, EXPERTS)], ids=["dense", "experts"]
)
def test_exported_folder_is_read_by_peft_and_merges_to_the_same_log_probs(
    tmp_path: Path, architecture: dict[str, Any], form: dict[str, Any]
) -> None:
    engine, base, folder = trained_engine(tmp_path, form, architecture=architecture)
    theirs, batch = peft_model(base, folder).eval(), batch_of(3)
    expected = np.array([-scored.sum() for scored in engine.score(batch, silent)])
    for model in (theirs, theirs.merge_and_unload()):
        found = np.array([float(mean_loss(model, [s]).detach()) * s.trained for s in batch])
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "parameters", [["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], ["mlp.experts.gate_up_proj"]]
)
def test_an_adapter_of_experts_by_peft_is_the_start_of_a_run(tmp_path: Path, parameters: list[str]) -> None:
    base = base_folder(tmp_path, MOE)
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=parameters)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    theirs.save_pretrained(tmp_path / "adapter")
    section = {"path": str(tmp_path / "adapter")}
    ours = adapter_config(tmp_path / "run", base)
    ours = ours.model_copy(update={"lora": type(ours.lora).model_validate(section)})
    (note,) = check_adapter(ours, base)
    assert f"{4 * len(parameters)} of 8 tensors of experts" in note
    engine, batch = begun(TorchEngine(ours)), batch_of(3)
    expected = np.array([float(mean_loss(theirs.eval(), [s]).detach()) * s.trained for s in batch])
    np.testing.assert_allclose([-scored.sum() for scored in engine.score(batch, silent)], expected, rtol=1e-5)


def test_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    _, base, folder = trained_engine(tmp_path, {}, steps=0)
    config = adapter_config(tmp_path / "other", base)
    wider = base_folder(tmp_path / "wider", {**QWEN3_WIDE})
    section = type(config.lora).model_validate({"path": str(folder)})
    with pytest.raises(ConfigError, match=r"lora.path .*another model or rank: .* has shape"):
        list(check_adapter(config.model_copy(update={"lora": section}), wider))


QWEN3_WIDE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def test_adapter_of_a_reward_model_is_read_by_peft(tmp_path: Path) -> None:
    base = base_folder(tmp_path)
    config = adapter_config(tmp_path / "run", base, algorithm={"name": "reward_model"})
    engine = begun(TorchEngine(config))
    engine.export(folder := folder_of(tmp_path / "model"))
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(model, folder / "adapter")
    ours = dict(engine.model.named_parameters())["score.weight"]
    found = theirs.base_model.model.score.modules_to_save["default"].weight
    assert torch.equal(found, ours)
