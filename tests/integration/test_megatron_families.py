"""Two ranks train each text family as one process does, and publish its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.engines.protocols import TrainingEngine, train
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.weights import files as weights
from tests.support.batches import batch_of, silent
from tests.support.text_families import MEGATRON, save_random
from tests.support.tiny_megatron import config_of, ranks_of, skip_if_missing

skip_if_missing()

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel": 2},
    "ep2": {"expert_parallel": 2},
}
CASES = [
    (name, layout)
    for name, fields in MEGATRON.items()
    for layout in LAYOUTS
    if layout != "ep2" or "num_experts_per_tok" in fields
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_two_ranks_take_the_step_of_one_process(tmp_path: Path, name: str, layout: str) -> None:
    trainer = {"learning_rate": 1e-3, **ranks_of(LAYOUTS[layout])}
    config = config_of(tmp_path, MEGATRON[name], trainer=trainer)
    save_random(config)
    group = TrainerGroup(config)
    try:
        found = [step_of(engine, tmp_path / type(engine).__name__) for engine in (group, TorchEngine(config))]
    finally:
        group.close()
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-4)
    assert found[0][1].keys() == found[1][1].keys()
    for weight, tensor in found[1][1].items():
        np.testing.assert_allclose(found[0][1][weight], tensor, rtol=0, atol=1e-4, err_msg=weight)


def step_of(engine: TrainingEngine, path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Take one step; return loss and gradient norm, and the weights."""
    engine.initialise(5)
    engine.finish_warm_start()
    metrics = train(engine, batch_of(0), 0, silent).metrics
    shards = [path.with_name(f"{path.name}.{number}") for number in range(engine.shards)]
    assert engine.publish(*shards) == engine.fingerprint()
    return {name: metrics[name] for name in ("loss", "grad_norm")}, weights.load(shards)
