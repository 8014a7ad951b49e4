"""Masks with holes, several sequences a sample and advantages of tokens: same numbers as the torch engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.scorer import TorchScorer
from tests.support.batches import routed, silent
from tests.support.episodes import IGNORED, episode_batch
from tests.support.tiny_megatron import DENSE, MOE, config_of, skip_if_missing
from tests.support.trained_engines import max_difference, started, weights_of

skip_if_missing()

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402
from relax_actors.engines.megatron.mcore.scorer import MegatronScorer  # noqa: E402
from relax_actors.engines.ranks import wire  # noqa: E402 after the check
from relax_actors.engines.ranks.rpc import pack_samples, unpack_samples  # noqa: E402

REJECT = {"reject": {"kind": "geometric", "low": 0.9, "high": 1.1}}


def assert_equal_training(tmp_path: Path, batches: list[list[TrainSample]], **sections: Any) -> None:
    """Train both engines on the same batches and compare metrics, gradient norms and weights."""
    config = config_of(tmp_path, sections.pop("architecture", DENSE), **sections)
    megatron, torch_engine = started(MegatronEngine(config)), started(TorchEngine(config))
    for step, batch in enumerate(batches):
        ours = train(megatron, batch, step, silent).metrics
        theirs = train(torch_engine, batch, step, silent).metrics
        assert ours.keys() == theirs.keys()
        assert ours["tokens"] == sum(sample.trained for sample in batch)
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5 if name != "grad_norm" else 1e-4), name
    assert max_difference(weights_of(megatron, tmp_path / "a"), weights_of(torch_engine, tmp_path / "b")) < 5e-5


@pytest.mark.parametrize("aggregate", ["token_mean", "sample_mean_of_means"])
@pytest.mark.parametrize("architecture", [DENSE, MOE], ids=["qwen3", "qwen3_moe"])
def test_masked_episodes_train_as_in_torch_engine(tmp_path: Path, architecture: dict[str, Any], aggregate: str) -> None:
    algorithm = {"kl": {"place": "loss", "coefficient": 0.1}, "aggregate": aggregate, **REJECT}
    batches = [episode_batch(step) for step in range(3)]
    settings = {"learning_rate": 1e-3}
    assert_equal_training(tmp_path, batches, architecture=architecture, algorithm=algorithm, trainer=settings)


def test_given_reference_and_proximal_logprobs_are_used(tmp_path: Path) -> None:
    random = np.random.default_rng(1)

    def scored(sample: TrainSample) -> TrainSample:
        near = [
            np.where(sample.loss_mask, sample.logprobs + 0.1 * random.standard_normal(len(sample)), IGNORED)
            for _ in range(2)
        ]
        return replace(
            sample, reference_logprobs=near[0].astype(np.float32), proximal_logprobs=near[1].astype(np.float32)
        )

    algorithm = {
        "kl": {"place": "loss", "coefficient": 0.1},
        "proximal": "actor_fwd",
        "correction": {"kind": "tis"},
        **REJECT,
    }
    roles = {"reference": {}, "actor_fwd": {}}
    batches = [[scored(sample) for sample in episode_batch(step)] for step in range(2)]
    assert_equal_training(tmp_path, batches, algorithm=algorithm, roles=roles, trainer={"learning_rate": 1e-3})


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_masked_episodes_replay_recorded_experts(tmp_path: Path, recompute: str) -> None:
    settings = {"learning_rate": 1e-3, "router_replay": True, "recompute": recompute}
    batches = [routed(episode_batch(step), step, MOE) for step in range(3)]
    algorithm = {"kl": {"place": "loss", "coefficient": 0.1}}
    assert_equal_training(tmp_path, batches, architecture=MOE, algorithm=algorithm, trainer=settings)


def test_values_at_masked_tokens_change_nothing(tmp_path: Path) -> None:
    """The mask alone decides which tokens enter losses, gradients and metrics."""
    config = config_of(
        tmp_path,
        DENSE,
        algorithm={"kl": {"place": "loss", "coefficient": 0.1}, "aggregate": "sample_mean_of_means", **REJECT},
    )
    found = []
    for value in (0.0, -3.0):
        batch = [
            replace(
                sample,
                logprobs=np.where(sample.loss_mask, sample.logprobs, value).astype(np.float32),
                advantages=np.where(sample.loss_mask, sample.advantages, value).astype(np.float32),
            )
            for sample in episode_batch(0)
        ]
        engine = started(MegatronEngine(config))
        metrics = train(engine, batch, 0, silent).metrics
        found.append((metrics, engine.fingerprint()))
    assert found[0] == found[1]


def test_scorer_scores_masked_tokens_as_zero_and_others_as_torch_scorer(tmp_path: Path) -> None:
    config = config_of(tmp_path, DENSE)
    trainer, batch = started(MegatronEngine(config)), episode_batch(0)
    fingerprint, shard = trainer.publish(tmp_path / "weights"), tmp_path / "weights"
    found = []
    for scorer in (TorchScorer(config), MegatronScorer(config)):
        scorer.load(0, fingerprint, [shard])
        found.append(scorer.score(batch, silent))
        for sample, scored in zip(batch, found[-1], strict=True):
            assert scored.dtype == np.float32
            assert not scored[~sample.loss_mask].any()
            assert (scored[sample.loss_mask] < 0).all()
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_supervised_step_trains_masked_tokens_only(tmp_path: Path) -> None:
    config = config_of(tmp_path, DENSE)
    losses, found = [], []
    for engine in (MegatronEngine(config), TorchEngine(config)):
        engine.initialise(5)
        losses.append([engine.warm_start(episode_batch(0), 1e-3, silent).metrics["loss"] for _ in range(3)])
        found.append(weights_of(engine, tmp_path / type(engine).__name__))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert max_difference(*found) < 5e-5


def test_samples_survive_encoding_for_ranks() -> None:
    batch = routed(episode_batch(0), 0, MOE)
    batch[1] = replace(batch[1], routed_experts=None, reference_logprobs=batch[1].logprobs)
    received = unpack_samples(wire.decode(wire.encode(pack_samples(batch))))
    assert len(received) == len(batch)
    for ours, theirs in zip(received, batch, strict=True):
        for name in TrainSample.__dataclass_fields__:
            sent, got = getattr(theirs, name), getattr(ours, name)
            if isinstance(sent, np.ndarray):
                assert got.dtype == sent.dtype
                np.testing.assert_array_equal(got, sent)
            else:
                assert got == sent
