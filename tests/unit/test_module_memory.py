"""Weights that are drawn module by module are those of a model that is built whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.engines.torch.module_memory import draw
from tests.support.models import QWEN3, config_of, qwen3_moe

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2}
MODELS = {
    "tied": QWEN3,
    "untied": QWEN3 | {"tie_word_embeddings": False},
    "experts": qwen3_moe(QWEN3),
    "drawn again by the parent": GPT2,
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_drawn_by_module_are_those_of_the_whole_model(tmp_path: Path, name: str) -> None:
    path = config_of(tmp_path, MODELS[name]).model_path
    whole = tensors_of(build(path, seed=3))

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[: tensor.shape[0] // 2].clone()

    parts = draw(partial(build, path, seed=3, device=None), part)
    assert list(parts) == list(whole)
    for key, tensor in whole.items():
        assert torch.equal(parts[key], part(tensor)), key
