"""Logits in float32: log-probs that are computed in half precision come nearer to those in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relax_actors.data.model_folder import measure
from relax_actors.engines.sglang.server_arguments import server_arguments
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.scorer import TorchScorer
from tests.support.batches import batch_of, silent
from tests.support.models import QWEN3, config_of
from tests.support.trained_engines import started

SHARP = QWEN3 | {"initializer_range": 0.3}


def distance(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(one) - np.concatenate(other)).mean())


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_logits_in_float32_bring_log_probs_nearer_to_float32(tmp_path: Path, precision: str) -> None:
    exact = started(TorchEngine(config_of(tmp_path / "exact", SHARP))).score(batch_of(0), silent)
    found = {}
    for wide in (False, True):
        sections = {"model": {"fp32_lm_head": wide}, "trainer": {"precision": precision}}
        config = config_of(tmp_path / str(wide), SHARP, **sections)
        engine = started(TorchEngine(config))
        found["trainer", wide] = distance(engine.score(batch_of(0), silent), exact)
        scorers = [TorchScorer(of, "cpu") for of in (config, config_of(tmp_path / "exact", SHARP))]
        print_of = engine.publish(file := tmp_path / f"{wide}.safetensors")
        for scorer in scorers:
            scorer.load(0, print_of, [file])
        found["scorer", wide] = distance(*(scorer.score(batch_of(0), silent) for scorer in scorers))
    assert found["trainer", True] < found["trainer", False]
    assert found["scorer", True] != found["scorer", False]  # rounding of its weights counts as much


@pytest.mark.parametrize("wide", [False, True])
def test_servers_compute_logits_in_float32_as_the_trainer_does(tmp_path: Path, *, wide: bool) -> None:
    config = config_of(tmp_path, QWEN3, model={"fp32_lm_head": wide}, rollout={"backend": "sglang"})
    arguments = server_arguments(config, config.model_path, measure(config.model_path), 1, key="k", cuda=False)
    assert ("--enable-fp32-lm-head" in arguments) == wide
