"""Masked multi-turn episodes train in two ranks as in the torch engine, at every kind of parallelism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_actors.config import Config
from relax_actors.engines.protocols import train
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.engines.torch.engine import TorchEngine
from tests.support.batches import routed, silent
from tests.support.episodes import episode_batch
from tests.support.tiny_megatron import DENSE, MOE, config_of, ranks_of, skip_if_missing
from tests.support.trained_engines import max_difference, started, weights_of

skip_if_missing()

STEPS = 3
ALGORITHM = {
    "kl": {"place": "loss", "coefficient": 0.1},
    "aggregate": "sample_mean_of_means",
    "reject": {"kind": "geometric", "low": 0.9, "high": 1.1},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2},
    "tp2_sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
    "pp2_vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "cp2": {"context_parallel": 2},
    "dp2": {},
}
REPLAYED: dict[str, dict[str, Any]] = {
    "tp2_sp_recompute": {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"},
    "cp2": {"context_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "ep2": {"expert_parallel": 2},
}


def configured(tmp_path: Path, model: dict[str, Any], section: dict[str, Any], **trainer: Any) -> Config:
    settings = {"learning_rate": 1e-3, **ranks_of(section), **trainer}
    return config_of(tmp_path, model, algorithm=ALGORITHM, trainer=settings)


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert max_difference(one, other) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_masked_episodes_as_torch_engine(
    tmp_path: Path, group_of: Callable[[Config], TrainerGroup], name: str
) -> None:
    config = configured(tmp_path, DENSE, LAYOUTS[name])
    group, alone = started(group_of(config)), started(TorchEngine(config))
    for step in range(STEPS):
        batch = episode_batch(step)
        ours, theirs = train(group, batch, step, silent).metrics, train(alone, batch, step, silent).metrics
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-5)
        assert ours["kl"] == pytest.approx(theirs["kl"], abs=5e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["ratio_p99"] == pytest.approx(theirs["ratio_p99"], abs=5e-5)
        assert ours["tokens"] == theirs["tokens"] == sum(sample.trained for sample in batch)
        assert ours["rejected"] == theirs["rejected"]
    assert_same_weights(weights_of(group, tmp_path / "group"), weights_of(alone, tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(REPLAYED))
def test_two_ranks_replay_experts_of_masked_episodes_as_torch_engine(
    tmp_path: Path, group_of: Callable[[Config], TrainerGroup], name: str
) -> None:
    config = configured(tmp_path, MOE, REPLAYED[name], router_replay=True)
    group, alone = started(group_of(config)), started(TorchEngine(config))
    for step in range(STEPS):
        batch = routed(episode_batch(step), step, MOE)
        ours, theirs = train(group, batch, step, silent).metrics, train(alone, batch, step, silent).metrics
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["rerouted"] == pytest.approx(theirs["rerouted"], abs=0.01)
        assert ours["tokens"] == theirs["tokens"]
    assert_same_weights(weights_of(group, tmp_path / "group"), weights_of(alone, tmp_path / "alone"))
