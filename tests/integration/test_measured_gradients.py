"""Gradients by micro-batch: ranks measure those of one process, and a measurement changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from relax_actors.engines.megatron import installation
from relax_actors.engines.protocols import train
from relax_actors.engines.protocols.training import GRADIENT_OF, StepResult
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.errors import ConfigError
from tests.support import models
from tests.support.batches import batch_of, silent
from tests.support.models import qwen3_moe
from tests.support.tiny_megatron import DENSE
from tests.support.trained_engines import started

SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "max_tokens_per_microbatch": 30}
MEGATRON: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2, each rank its own optimizer": {"distributed_optimizer": False},
    "tp2": {"tensor_parallel": 2},
    "tp2, sequence parallel": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
    "ep2": {"expert_parallel": 2},
}
SAME_PARTS = ("tp2", "tp2, sequence parallel", "pp2")
"""Layouts whose ranks share each micro-batch, so that these are those of one process."""
ROUNDING = 1e-4
"""Relative difference of sums in float32 that are added up in another order."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StepResult]:
    """The measured steps of one process, of a dense model and of one with experts."""
    results = {}
    for name, architecture in (("dense", DENSE), ("experts", qwen3_moe(DENSE))):
        folder = tmp_path_factory.mktemp(name)
        engine = started(TorchEngine(models.config_of(folder, architecture, trainer=SETTINGS)))
        engine.measure_gradients()
        results[name] = train(engine, batch_of(3), 0, silent)
    return results


def checked(result: StepResult) -> StepResult:
    """Check that the norms fit each other, and that the last one is the norm of the step's gradients."""
    for part in result.micro_batches:
        squares = [norm * norm for name, norm in part.items() if name.startswith(GRADIENT_OF)]
        assert len(squares) > 10
        assert part["gradient"] == pytest.approx(math.sqrt(math.fsum(squares)))
    tokens = sum(part["tokens"] for part in result.micro_batches)
    assert result.micro_batches[-1]["gradient"] / tokens == pytest.approx(result.metrics["grad_norm"], rel=ROUNDING)
    return result


def gradients(result: StepResult) -> list[float]:
    return [part["gradient"] for part in result.micro_batches]


def measured(folder: Path, architecture: dict[str, Any], trainer: dict[str, Any]) -> StepResult:
    """Return a step of ranks with measured gradients, after the same step without ended with the same weights."""
    group = TrainerGroup(models.config_of(folder, architecture, trainer=SETTINGS | trainer), lambda *_: None)
    try:
        prints = []
        for measures in (False, True):
            if measures:
                group.measure_gradients()
            result = train(started(group), batch_of(3), 0, silent)
            prints.append(group.fingerprint())
            assert all(("gradient" in part) is measures for part in result.micro_batches)
        assert prints[0] == prints[1]
        return checked(result)
    finally:
        group.close()


def test_one_process_measures_each_micro_batch(alone: dict[str, StepResult]) -> None:
    for result in alone.values():
        assert len(checked(result).micro_batches) > 3


@pytest.mark.slow
def test_ranks_of_torch_measure_the_gradients_of_one_process(tmp_path: Path, alone: dict[str, StepResult]) -> None:
    result = measured(tmp_path, DENSE, {"torch": {"ranks": 2}})
    assert gradients(result)[-1] == pytest.approx(gradients(alone["dense"])[-1], rel=ROUNDING)
    last, expected = result.micro_batches[-1], alone["dense"].micro_batches[-1]
    assert {name: last[name] for name in expected if name.startswith(GRADIENT_OF)} == pytest.approx(
        {name: norm for name, norm in expected.items() if name.startswith(GRADIENT_OF)}, rel=ROUNDING, abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", MEGATRON)
def test_ranks_of_megatron_measure_the_gradients_of_one_process(
    tmp_path: Path, alone: dict[str, StepResult], layout: str
) -> None:
    try:
        installation.require()
    except ConfigError as error:
        pytest.skip(str(error))
    name, architecture = ("experts", qwen3_moe(DENSE)) if layout == "ep2" else ("dense", DENSE)
    trainer = {"backend": "megatron", "megatron": {"ranks": 2, **MEGATRON[layout]}}
    result, expected = gradients(measured(tmp_path, architecture, trainer)), gradients(alone[name])
    assert result[-1] == pytest.approx(expected[-1], rel=ROUNDING)
    if layout in SAME_PARTS:
        assert result == pytest.approx(expected, rel=ROUNDING)
