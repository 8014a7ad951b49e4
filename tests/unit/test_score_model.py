"""Reward models: transformers loads what was trained, and computes the same scores."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMultimodalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from relax_actors.config import Config
from relax_actors.data.score_folder import read_score_folder
from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import tensors_of
from relax_actors.engines.torch.reward_model import TorchRewardModel
from relax_actors.engines.torch.score_model import build_score_model
from relax_actors.engines.torch.scorer import TorchScorer
from relax_actors.errors import ConfigError
from relax_actors.media.family import family_of
from relax_actors.weights.files import load
from tests.support.batches import silent
from tests.support.models import QWEN3, VOCABULARY, config_of, qwen3_moe
from tests.support.score_batches import media_pairs, score_batch
from tests.support.tiny_media_models import FAMILIES, architecture_of, model_inputs

KINDS = {"reward_model": ("pairs", 1), "outcome_reward": ("labelled", 3), "process_reward": ("steps", 2)}
UNTIED = QWEN3 | {"tie_word_embeddings": False, "pad_token_id": VOCABULARY - 1}


def config_for(name: str, folder: Path, model: Path | None = None, **trainer: Any) -> Config:
    classes = KINDS[name][1]
    config = config_of(folder, UNTIED, algorithm={"name": name, "scores": {"classes": classes}}, trainer=trainer)
    if model is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": model})})


def trained(config: Config, batch: list[TrainSample], steps: int = 3) -> TorchEngine:
    engine = TorchEngine(config)
    engine.initialise(3)
    engine.finish_warm_start()
    for step in range(steps):
        train(engine, batch, step, silent)
    return engine


def policy_in(folder: Path, architecture: dict[str, Any]) -> TorchEngine:
    """Write a policy with random weights to the folder `model`."""
    config = config_of(folder / "policy", architecture)
    policy = TorchEngine(config)
    policy.initialise(7)
    policy.export(folder / "model")
    shutil.copy(config.model_path / "tokenizer.json", folder / "model")
    return policy


@pytest.mark.parametrize("name", KINDS)
def test_exported_folder_has_the_scores_of_the_trainer(tmp_path: Path, name: str) -> None:
    rows, classes = KINDS[name]
    batch, config = score_batch(rows, classes), config_for(name, tmp_path / "run")
    engine = trained(config, batch)
    engine.export(tmp_path / "model")
    shard = tmp_path / "weights.safetensors"
    scorer = TorchScorer(config)
    scorer.load(1, engine.publish(shard), [shard])
    scored = scorer.score(batch, silent)
    auto: Any = AutoModelForTokenClassification if rows == "steps" else AutoModelForSequenceClassification
    model, report = auto.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.num_labels == classes
    model.eval()
    for sample, own in zip(batch, scored, strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        places = torch.from_numpy(np.flatnonzero(sample.loss_mask))
        of_places = logits[0, places] if rows == "steps" else logits
        if rows == "pairs":
            expected = of_places[:, 0]
        else:
            labels = torch.from_numpy(sample.masked("targets")).long()
            expected = of_places.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        np.testing.assert_allclose(own[sample.loss_mask], expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_audio"])
def test_scores_of_prompts_with_media_are_those_of_the_policy_with_another_head(tmp_path: Path, family: str) -> None:
    algorithm = {"name": "outcome_reward", "scores": {"classes": 3}}
    trainer = {"max_tokens_per_microbatch": 1024}
    config = config_of(tmp_path / "run", architecture_of(family), algorithm=algorithm, trainer=trainer)
    labels = [np.full(len(sample), n % 3, np.float32) for n, sample in enumerate(media_pairs(config))]
    batch = [replace(sample, targets=own) for sample, own in zip(media_pairs(config), labels, strict=True)]
    trained(config, batch).export(tmp_path / "model")
    for path in config.model_path.iterdir():
        if not (tmp_path / "model" / path.name).exists():
            shutil.copy(path, tmp_path / "model")
    folder = read_score_folder(tmp_path / "model", "test")
    scores = TorchRewardModel(config, tmp_path / "model", folder).score(batch, silent)
    weight, own = load([tmp_path / "model" / "model.safetensors"])["score.weight"], family_of(config.model_path)
    policy = AutoModelForMultimodalLM.from_pretrained(tmp_path / "model").eval()
    policy.lm_head = torch.nn.Linear(weight.shape[1], 3, bias=False)
    policy.lm_head.weight.data = weight
    assert own is not None
    for sample, found in zip(batch, scores, strict=True):
        assert sample.media is not None
        with torch.no_grad():
            logits = policy(**model_inputs(own, sample.token_ids, sample.media.items)).logits[0, -1]
        np.testing.assert_allclose(found[0], logits.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_media_has_a_classifier(tmp_path: Path, family: str) -> None:
    path = config_of(tmp_path / "run", architecture_of(family)).model_path
    with torch.device("meta"):
        model = build_score_model(path, classes=2, of_steps=False, device=None)
    names = tensors_of(model)
    assert names["score.weight"].shape[0] == 2
    assert not any(name.startswith("lm_head") for name in names)


def test_padded_answers_have_the_same_scores_in_transformers(tmp_path: Path) -> None:
    batch, config = score_batch("pairs"), config_for("reward_model", tmp_path / "run")
    trained(config, batch).export(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    rows = [torch.from_numpy(sample.token_ids.astype(np.int64)) for sample in batch]
    pad = model.config.pad_token_id
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    with torch.no_grad():
        together = model(input_ids=padded, attention_mask=(padded != pad).long()).logits
        alone = torch.cat([model(input_ids=ids[None]).logits for ids in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_reward_model_begins_with_the_body_of_a_policy_and_a_head_of_its_seed(tmp_path: Path) -> None:
    policy = policy_in(tmp_path, UNTIED)
    config = config_for("reward_model", tmp_path / "run", tmp_path / "model")
    one, other = TorchEngine(config), TorchEngine(config)
    one.initialise(3)
    other.initialise(3)
    assert one.fingerprint() == other.fingerprint()
    body = tensors_of(policy.model)
    own = tensors_of(one.model)
    assert own.keys() - body.keys() == {"score.weight"}
    assert all(torch.equal(own[name], tensor) for name, tensor in body.items() if name in own)
    assert own["score.weight"].abs().max() > 0
    other.initialise(4)
    assert one.fingerprint() != other.fingerprint()


def test_reward_model_is_trained_further_from_its_own_folder(tmp_path: Path) -> None:
    batch = score_batch("pairs")
    engine = trained(config_for("reward_model", tmp_path / "run"), batch)
    engine.export(tmp_path / "model")
    again = TorchEngine(config_for("reward_model", tmp_path / "again", tmp_path / "model"))
    again.initialise(9)
    assert again.fingerprint() == engine.fingerprint()
    other = TorchEngine(config_for("outcome_reward", tmp_path / "other", tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"score\.weight has shape \[1, 32\], not \[3, 32\]"):
        other.initialise(9)


def test_experts_of_a_policy_are_read_into_a_reward_model(tmp_path: Path) -> None:
    architecture = qwen3_moe(UNTIED)
    policy = policy_in(tmp_path, architecture)
    config = config_of(tmp_path / "run", architecture, algorithm={"name": "reward_model"})
    moved = config.model_copy(update={"model": config.model.model_copy(update={"path": tmp_path / "model"})})
    engine = TorchEngine(moved)
    engine.initialise(3)
    body, own = tensors_of(policy.model), tensors_of(engine.model)
    taken = [name for name, tensor in body.items() if name in own and torch.equal(own[name], tensor)]
    assert taken == [name for name in body if not name.startswith("lm_head")]
    engine.export(tmp_path / "scores")
    _, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scores", output_loading_info=True)
    assert not report["missing_keys"]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_a_reward_model(tmp_path: Path, precision: str) -> None:
    config = config_for("reward_model", tmp_path / "run", precision=precision, learning_rate=1e-3)
    engine = TorchEngine(config)
    engine.initialise(3)
    engine.finish_warm_start()
    losses = [train(engine, score_batch("pairs"), step, silent).metrics["loss"] for step in range(6)]
    assert losses[-1] < losses[0]
    engine.export(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert model.dtype == getattr(torch, precision)


@pytest.mark.parametrize("name", KINDS)
def test_checkpoint_resumes_with_the_same_bits(tmp_path: Path, name: str) -> None:
    batch, config = score_batch(*KINDS[name]), config_for(name, tmp_path / "run")
    engine = trained(config, batch)
    (tmp_path / "saved").mkdir()
    engine.save(tmp_path / "saved")
    again = TorchEngine(config)
    again.load(tmp_path / "saved")
    for step in range(3, 5):
        assert train(engine, batch, step, silent).metrics == train(again, batch, step, silent).metrics
    assert again.fingerprint() == engine.fingerprint()
