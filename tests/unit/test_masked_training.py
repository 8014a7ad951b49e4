"""Training with loss masks: only tokens of the mask count, for any split into micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_actors.config import Config, validate
from relax_actors.data.model_folder import prepare
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.engines.torch.scorer import TorchScorer
from relax_actors.weights import files
from tests.support.batches import silent

ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "masked", "folder": str(folder), "seed": 3, "steps": 10},
        "model": {"architecture": ARCHITECTURE, "tokenizer": {"alphabet": "0123456789>#"}},
        "data": {"kind": "python", "function": "nothing"},
        "trainer": {"learning_rate": 1e-2, "max_grad_norm": 1e9},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    config = validate(tree, "test")
    prepare(config, config.model_path)
    return config


def engine_of(config: Config) -> TorchEngine:
    engine = TorchEngine(config)
    engine.initialise(5)
    engine.finish_warm_start()
    return engine


def batch(seed: int = 1) -> list[TrainSample]:
    """Draw sequences with random masks; the first two belong to one sample."""
    random, found = np.random.default_rng(seed), []
    for i, length in enumerate((9, 14, 6, 11)):
        mask = random.random(length) < 0.5
        mask[0], mask[-1] = False, True
        found.append(
            TrainSample(
                random.integers(0, 12, length).astype(np.int32),
                mask,
                logprobs=random.uniform(-3, -1, length).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=random.normal(size=length).astype(np.float32),
                row=i // 2,
            )
        )
    tokens = found[0].trained + found[1].trained
    return [replace(s, sample_tokens=tokens if i < 2 else s.trained) for i, s in enumerate(found)]


def gradients(config: Config, samples: list[TrainSample]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the gradients of a step, normalised as the step does, and its metrics."""
    engine = engine_of(config)
    before = {name: tensor.clone() for name, tensor in tensors_of(engine.model).items()}
    engine.accumulate(samples, silent)
    sums = {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}
    metrics = dict(engine.step(0, silent).metrics)
    norm = torch.cat([grad.flatten() for grad in sums.values()]).norm().item()
    assert any(not torch.equal(before[name], tensor) for name, tensor in tensors_of(engine.model).items())
    return {name: grad * (metrics["grad_norm"] / norm) for name, grad in sums.items()}, metrics


def expected_loss(config: Config, samples: list[TrainSample], mode: str) -> torch.Tensor:
    """Compute PPO's clipped loss of the tokens of the mask, with a plain forward pass of each sequence."""
    model = build(config.model_path, seed=5).eval()
    terms, weights = [], []
    for sample in samples:
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        mask = torch.from_numpy(sample.loss_mask[1:])
        logits = model(tokens, use_cache=False).logits[0, :-1]
        new = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0][mask]
        old, advantage = (torch.from_numpy(sample.masked(name)) for name in ("logprobs", "advantages"))
        ratio = (new - old).exp()
        terms.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).sum())
        weights.append(sample.sample_tokens)
    if mode == "token_mean":
        return torch.stack(terms).sum() / sum(s.trained for s in samples)
    return torch.stack([term / weight for term, weight in zip(terms, weights, strict=True)]).sum() / 3


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean_of_means"])
def test_loss_covers_the_tokens_of_the_mask_and_weights_samples_equally(tmp_path: Path, mode: str) -> None:
    config = config_of(tmp_path, algorithm={"aggregate": mode})
    samples = batch()
    _, metrics = gradients(config, samples)
    assert metrics["tokens"] == sum(s.trained for s in samples)
    assert metrics["loss"] == pytest.approx(expected_loss(config, samples, mode).item(), abs=1e-5)


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean_of_means"])
@pytest.mark.parametrize("budget", [14, 25])
def test_masked_step_does_not_depend_on_its_micro_batches(tmp_path: Path, mode: str, budget: int) -> None:
    whole, metrics = gradients(config_of(tmp_path, algorithm={"aggregate": mode}), batch())
    cut_config = config_of(tmp_path, algorithm={"aggregate": mode}, trainer={"max_tokens_per_microbatch": budget})
    cut, others = gradients(cut_config, batch())
    assert others["micro_batches"] > metrics["micro_batches"]
    assert others["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    for name, grad in whole.items():
        torch.testing.assert_close(cut[name], grad, rtol=1e-4, atol=1e-6)


def test_per_token_arrays_are_ignored_outside_the_mask(tmp_path: Path) -> None:
    config, samples = config_of(tmp_path), batch()
    noisy = [
        replace(
            sample,
            logprobs=np.where(sample.loss_mask, sample.logprobs, 7.0).astype(np.float32),
            advantages=np.where(sample.loss_mask, sample.advantages, np.nan).astype(np.float32),
        )
        for sample in samples
    ]
    engines = [engine_of(config), engine_of(config)]
    for engine, given in zip(engines, (samples, noisy), strict=True):
        engine.accumulate(given, silent)
        engine.step(0, silent)
    assert engines[0].fingerprint() == engines[1].fingerprint()


def test_scores_are_zero_outside_the_mask(tmp_path: Path) -> None:
    config, samples = config_of(tmp_path), batch()
    trainer, scorer = engine_of(config), TorchScorer(config)
    shard = tmp_path / "weights.safetensors"
    scorer.load(0, trainer.publish(shard), [shard])
    scored = scorer.score(samples, silent)
    for sample, logprobs in zip(samples, scored, strict=True):
        assert (logprobs[sample.loss_mask] < 0).all()
        assert not logprobs[~sample.loss_mask].any()
    same = [replace(s, logprobs=logprobs) for s, logprobs in zip(samples, scored, strict=True)]
    trainer.accumulate(same, silent)
    assert trainer.step(0, silent).metrics["abs_delta"] < 1e-6
    assert files.fingerprint(tensors_of(trainer.model))
