"""A step has the loss, metrics and gradient that it would have if its sequences shared nothing, for every algorithm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.presets import PRESETS
from relax_actors.config.training import CriticSection
from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.torch.critic import TorchCritic
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.engines.torch.scorer import TorchScorer
from tests.conformance.base.critic_engine import policy_of
from tests.support.batches import batch_of, routed, valued
from tests.support.media_batches import media_batch
from tests.support.models import ALPHABET, QWEN3, config_of, publish, qwen3_moe
from tests.support.tiny_media_models import architecture_of
from tests.unit.test_step_invariance import losses

TOP = 3
KINDS = ("", "proximal_", "reference_", "teacher_")
SECTIONS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in losses() if name in PRESETS},
    "entropy": {"entropy": {"coefficient": 0.02}},
    "high entropies": {"entropy": {"quantile": 0.5}},
    "kl": {"kl": {"place": "loss", "coefficient": 0.1, "kind": "k3"}},
    "correction": {"proximal": "trainer", "correction": {"kind": "tis", "normalise": "samples"}},
    "penalty": {"log_ratio_penalty": 0.1},
}


def rows(seed: int = 4) -> list[TrainSample]:
    """Draw the sequences of two rows: branches of branches, equal sequences, one of a single token, unread ends."""
    source, found = np.random.default_rng(seed), []

    def drawn(length: int) -> Any:
        return source.integers(0, len(ALPHABET), length, dtype=np.int32)

    for row in range(2):
        prompt, stem = drawn(9), drawn(6)
        branch = np.concatenate([stem, drawn(5)])
        ends = [
            stem,
            stem,
            branch,
            np.concatenate([branch, drawn(4)]),
            drawn(1),
            drawn(12),
            np.concatenate([stem, drawn(2)]),
        ]
        for i, end in enumerate(ends):
            length = len(prompt) + len(end)
            mask = (np.arange(length) >= len(prompt)) & (source.random(length) < 0.7)
            mask[-1 if len(end) < 3 else -2] = True  # a longer one ends with a token that is not trained
            mask[-1] &= len(end) < 3
            sample = TrainSample(np.concatenate([prompt, end]), mask, row=row, sample=max(0, i - 1))
            per_token: dict[str, Any] = {
                name: source.normal(mean, 0.3, length).astype(np.float32)
                for name, mean in (
                    ("advantages", 0),
                    ("values", 0),
                    ("returns", 0),
                    *((f"{n}logprobs", -2.5) for n in KINDS),
                )
            }
            top = np.argsort(source.random((length, len(ALPHABET))))[:, :TOP].astype(np.int32)
            shares = np.log(source.dirichlet(np.ones(TOP + 1), length)[:, :TOP]).astype(np.float32)
            found.append(replace(sample, **per_token, teacher_top_ids=top, teacher_top_logprobs=shares))
    # Sequences of a sample have one advantage.
    advantages = {(s.row, s.sample): s.advantages[0] for s in found if s.advantages is not None}
    tokens = Counter({key: sum(s.trained for s in found if (s.row, s.sample) == key) for key in advantages})
    return [
        replace(s, advantages=np.full(len(s), advantages[s.row, s.sample]), sample_tokens=tokens[s.row, s.sample])
        for s in found
    ]


def step_of(engine: TorchEngine | TorchCritic, samples: Sequence[TrainSample]) -> tuple[dict[str, float], torch.Tensor]:
    """Train a step; return its metrics and its gradient."""
    gradient: list[torch.Tensor] = []

    def capture(optimizer: Any, *_: Any) -> None:
        gradient.extend(p.grad.flatten().clone() for group in optimizer.param_groups for p in group["params"])

    hook = register_optimizer_step_pre_hook(capture)
    try:
        metrics = train(engine, samples, 0, lambda: None).metrics
    finally:
        hook.remove()
    return metrics, torch.cat(gradient)


def assert_same_step(engines: Sequence[TorchEngine | TorchCritic], samples: Sequence[TrainSample]) -> None:
    (metrics, gradient), (expected, wanted) = (step_of(engine, samples) for engine in engines)
    assert metrics.pop("micro_batches") < expected.pop("micro_batches")
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)  # some are means of float32 numbers
    assert float(wanted.abs().max()) > 0
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)


def engine_of(folder: Path, architecture: dict[str, Any], algorithm: dict[str, Any], **trainer: Any) -> TorchEngine:
    """Return an engine that computes in float64."""
    settings = {"max_grad_norm": 1e9, "max_tokens_per_microbatch": 60} | trainer
    engine = TorchEngine(config_of(folder, architecture, trainer=settings, algorithm=algorithm))
    engine.initialise(3)
    engine.model.double()
    if hasattr(engine.model.config, "num_experts"):
        engine.model.set_experts_implementation("eager")  # the others have no kernel for float64
    return engine


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_loss_and_gradient_are_those_of_sequences_that_share_nothing(tmp_path: Path, section: dict[str, Any]) -> None:
    engines = [engine_of(tmp_path / "run", QWEN3, section, share_prefixes=shares) for shares in (True, False)]
    samples = rows()
    if AlgorithmSection.model_validate(section).trains_scores:
        samples = [replace(sample, targets=(np.arange(len(sample)) % 2).astype(np.float32)) for sample in samples]
    assert_same_step(engines, samples)


def test_step_with_replayed_experts(tmp_path: Path) -> None:
    architecture = qwen3_moe(QWEN3)
    samples = rows()
    same = routed(samples[:1], 3, architecture)[0].routed_experts
    assert same is not None
    # Samples of the second row have the experts of one of them up to where they differ.
    grown = np.concatenate([same, same, same])
    samples = [
        *routed(samples[:7], 2, architecture),
        *(replace(sample, routed_experts=grown[: len(sample) - 1]) for sample in samples[7:]),
    ]
    settings: dict[str, Any] = {"router_replay": True, "max_tokens_per_microbatch": 80}
    engines = [
        engine_of(tmp_path / "run", architecture, {}, share_prefixes=shares, **settings) for shares in (True, False)
    ]
    (metrics, gradient), (expected, wanted) = (step_of(engine, samples) for engine in engines)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)


def test_critic(tmp_path: Path) -> None:
    values, gradients = [], []
    for shares in (True, False):
        trainer = {"share_prefixes": shares, "max_tokens_per_microbatch": 60}
        config = config_of(tmp_path / "run", QWEN3, trainer=trainer)
        critic = TorchCritic(config, CriticSection(learning_rate=1e-2, value_clip=0, max_grad_norm=1e9))
        critic.initialise(policy_of(config, tmp_path))
        train(critic, valued(batch_of(0), 0), 0, lambda: None)  # the head of a new critic is 0
        values.append(np.concatenate(critic.values(rows(), lambda: None)))
        gradients.append(step_of(critic, rows())[1])
    assert np.abs(values[1]).max() > 0
    np.testing.assert_allclose(values[0], values[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-4)


def test_scorer(tmp_path: Path) -> None:
    found: list[list[Any]] = []
    for shares in (True, False):
        trainer = {"share_prefixes": shares, "max_tokens_per_microbatch": 60}
        config = config_of(tmp_path / "run", QWEN3, trainer=trainer)
        scorer = TorchScorer(config)
        scorer.load(0, *publish(tensors_of(build(config.model_path, seed=5)), tmp_path / "weights"))
        tops = scorer.score_top(rows(), TOP, lambda: None)
        numbers = [*scorer.score(rows(), lambda: None), *scorer.squares(rows(), lambda: None)]
        found.append([*numbers, *(top.logprobs for top in tops), *(top.top_logprobs for top in tops)])
    for shared, alone in zip(*found, strict=True):
        np.testing.assert_allclose(shared, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_omni_thinker"])
def test_step_with_media(tmp_path: Path, model_type: str) -> None:
    settings: dict[str, Any] = {"max_tokens_per_microbatch": 2000}
    architecture = architecture_of(model_type)
    found = []
    for shares in (True, False):
        engine = engine_of(tmp_path / "run", architecture, {}, share_prefixes=shares, **settings)
        config = config_of(tmp_path / "run", architecture)
        found.append(step_of(engine, media_batch(config, model=engine.model)))
    (metrics, gradient), (expected, wanted) = found
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)
