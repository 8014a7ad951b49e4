"""Biases of routers stay in float32 where a model is published in half precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.engines.torch.stored_weights import fingerprint_of
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.weights import files as weights
from tests.support.models import config_of
from tests.support.text_families import MEGATRON


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_router_bias_reaches_the_engine_in_float32(tmp_path: Path, kind: str) -> None:
    config = config_of(tmp_path, MEGATRON[kind], trainer={"precision": "bfloat16"})
    drawn = tensors_of(build(config.model_path, seed=1))
    biases: dict[str, Tensor] = {
        name: torch.rand(t.shape) for name, t in drawn.items() if name.endswith("correction_bias")
    }
    (name,) = biases  # of two layers the second has experts
    assert not torch.equal(biases[name], biases[name].bfloat16().float())
    weights.save(drawn | biases, config.model_path / "model.safetensors")
    trainer = TorchEngine(config)
    trainer.initialise(1)
    path = tmp_path / "0.safetensors"
    fingerprint = trainer.publish(path)
    published = weights.load([path])
    assert {tensor.dtype for other, tensor in published.items() if other != name} == {torch.bfloat16}
    torch.testing.assert_close(published[name], biases[name], rtol=0, atol=0)
    engine = TransformersEngine(config.model_path, dtype=torch.bfloat16)
    engine.load(0, fingerprint, [path])
    torch.testing.assert_close(tensors_of(engine.model)[name], biases[name], rtol=0, atol=0)
    (folder := tmp_path / "checkpoint").mkdir()
    trainer.save(folder)
    assert fingerprint_of(folder) == fingerprint
