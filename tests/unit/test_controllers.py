"""Adaptive coefficients: hand-computed changes, and the same bits after a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.algorithms.controllers import (
    Coefficients,
    StepCoefficients,
    adapted_entropy,
    adapted_kl,
    applied_entropy,
)
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.training import TrainerSection
from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.torch.engine import TorchEngine
from tests.support.batches import silent
from tests.unit.test_masked_training import batch, config_of, engine_of

ADAPTIVE: dict[str, dict[str, Any]] = {
    "kl": {"place": "loss", "coefficient": 0.1, "target": 0.5, "horizon": 100},
    "entropy": {"coefficient": 0.01, "target": 2.6, "delta": 0.004},
}


def test_kl_coefficient_follows_the_error_within_a_fifth() -> None:
    settings = {"target": 6.0, "horizon": 1000, "samples": 100}
    assert adapted_kl(0.2, 6.6, **settings) == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    assert adapted_kl(0.2, 60.0, **settings) == pytest.approx(0.2 * (1 + 0.2 * 0.1))
    assert adapted_kl(0.2, 0.0, **settings) == pytest.approx(0.2 * (1 - 0.2 * 0.1))
    with pytest.raises(ValueError, match="KL is 0 and its horizon 10"):
        adapted_kl(0.2, 1.0, target=0, horizon=10, samples=1)


def test_entropy_coefficient_rises_up_to_the_target_and_applies_there_only() -> None:
    assert adapted_entropy(0.01, 0.2, target=0.2, delta=0.005) == pytest.approx(0.015)
    assert adapted_entropy(0.01, 0.3, target=0.2, delta=0.005) == pytest.approx(0.005)
    assert adapted_entropy(0.001, 0.3, target=0.2, delta=0.005) == 0.0
    assert applied_entropy(Coefficients(0, 0.01), 0.2) == 0.01
    assert applied_entropy(Coefficients(0, 0.01, last_entropy=0.3), 0.2) == 0.0
    assert applied_entropy(Coefficients(0, 0.01, last_entropy=0.3), None) == 0.01


def with_reference(samples: list[TrainSample]) -> list[TrainSample]:
    return [replace(s, reference_logprobs=s.logprobs - np.float32(0.3)) for s in samples]


def steps(engine: TorchEngine, numbers: range) -> list[tuple[float, float, float]]:
    """Train steps; return the coefficients of each, and its loss."""
    found = []
    for number in numbers:
        metrics = train(engine, with_reference(batch(number)), number, silent).metrics
        found.append((metrics["kl_coefficient"], metrics["entropy_coefficient"], metrics["loss"]))
    return found


def test_coefficients_adapt_and_continue_bit_for_bit_after_a_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path / "model", algorithm=ADAPTIVE)
    engine = engine_of(config)
    first = steps(engine, range(3))
    assert len({kl for kl, _, _ in first}) == 3
    assert len({entropy for _, entropy, _ in first}) == 3
    (tmp_path / "checkpoint").mkdir()
    engine.save(tmp_path / "checkpoint")
    loaded = engine_of(config)
    loaded.load(tmp_path / "checkpoint")
    assert steps(loaded, range(3, 6)) == steps(engine, range(3, 6))
    assert loaded.fingerprint() == engine.fingerprint()


def test_constant_coefficients_are_no_metrics_and_their_graph_is_skipped(tmp_path: Path) -> None:
    engine = engine_of(config_of(tmp_path))
    metrics = train(engine, batch(), 0, silent).metrics
    assert not {"kl_coefficient", "entropy_coefficient", "entropy", "kl"} & metrics.keys()


def test_all_updates_of_a_step_have_its_coefficients(tmp_path: Path) -> None:
    config = config_of(tmp_path, algorithm=ADAPTIVE, trainer={"minibatches": 2, "epochs": 2, "prompts_per_step": 4})
    engine, one = engine_of(config), ADAPTIVE["kl"]["coefficient"]
    found = steps(engine, range(9))
    assert [len(set(part)) for part in (found[:4], found[4:8])] == [4, 4], "losses of the updates"
    first, second, third = ({(kl, entropy) for kl, entropy, _ in part} for part in (found[:4], found[4:8], found[8:]))
    assert first == {(one, ADAPTIVE["entropy"]["coefficient"])}
    assert len(second) == len(third) == 1
    assert len(first | second | third) == 3


def test_a_step_adapts_by_the_mean_of_its_updates_and_counts_each_sample_once() -> None:
    algorithm = AlgorithmSection.model_validate(ADAPTIVE)
    coefficients = StepCoefficients(algorithm, TrainerSection(minibatches=2, epochs=2, prompts_per_step=4))
    for kl, entropy in ((6.0, 30.0), (7.0, 28.0), (5.0, 20.0), (4.0, 22.0)):
        assert coefficients.current == Coefficients(0.1, 0.01)
        coefficients.record({"tokens": 10.0, "samples": 10.0, "kl": kl, "entropy": entropy, "loss": 1.0})
    # The mean KL of a sample is 22 / 40, and the batch has 20 samples.
    assert coefficients.current.kl == pytest.approx(0.1 * (1 + (0.55 / 0.5 - 1) * 20 / 100))
    assert coefficients.current.entropy == pytest.approx(0.01 + 0.004)
    assert coefficients.current.last_entropy == pytest.approx(2.5)
