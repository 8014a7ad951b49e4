"""Conversion between Hugging Face and megatron-core weights is exact for any number of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from relax_actors.engines.megatron.architecture import architecture_of
from relax_actors.engines.megatron.conversion import Conversion, merge_shards, shard_axis, shard_of
from relax_actors.engines.megatron.folder_reader import SafetensorsReader, stored_weights
from relax_actors.engines.megatron.towers import tower_shapes
from relax_actors.engines.torch.model import build, tensors_of
from relax_actors.errors import ConfigError
from relax_actors.weights import files as weights
from tests.support.text_families import MEGATRON, save_random
from tests.support.tiny_media_models import OF_MEGATRON
from tests.support.tiny_megatron import DENSE, config_of, media_architecture

DECODER = ("model.language_model.", "model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
MODELS: dict[str, dict[str, Any]] = MEGATRON | {"odd_vocabulary": DENSE | {"vocab_size": 13}}
MODELS |= {name: media_architecture(name) for name in OF_MEGATRON}


def start(tmp_path: Path, model: dict[str, Any], ranks: int) -> tuple[Conversion, dict[str, torch.Tensor]]:
    folder = config_of(tmp_path, model).model_path
    architecture = architecture_of(folder)
    rows = -(-architecture.vocab_size // ranks) * ranks
    towers = tower_shapes(folder) if model["model_type"] in OF_MEGATRON else {}
    return Conversion(architecture, rows, towers), tensors_of(build(folder, seed=1))


def assert_reads(conversion: Conversion, stored: SafetensorsReader, tensors: dict[str, torch.Tensor]) -> None:
    for keys in conversion.entries():
        for key in keys:
            found, expected = (conversion.from_hugging_face(key, source) for source in (stored, tensors))
            assert torch.equal(found, expected), key


@pytest.mark.parametrize("model_type", OF_MEGATRON)
def test_files_of_multimodal_models_are_read_under_the_names_of_transformers(tmp_path: Path, model_type: str) -> None:
    conversion, tensors = start(tmp_path / "run", MODELS[model_type], 1)
    model = build(config_of(tmp_path / "run", MODELS[model_type]).model_path, seed=1)
    model.save_pretrained(folder := tmp_path / "saved")
    (path,) = folder.glob("*.safetensors")
    assert_reads(conversion, SafetensorsReader([path]), tensors)
    assert sorted(tower_shapes(folder)) == sorted(name for name in tensors if not name.startswith(DECODER))
    if "omni" in model_type:
        # The files of a model that also speaks.
        whole = {f"thinker.{name}": tensor for name, tensor in weights.load([path]).items()}
        # In another file: the tensors that were read are still mapped from the first.
        weights.save(whole | {"talker.model.norm.weight": torch.ones(4)}, other := folder / "whole.safetensors")
        assert_reads(conversion, SafetensorsReader([other]), tensors)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_conversion_to_shards_and_back_is_exact(tmp_path: Path, model: dict[str, Any], ranks: int) -> None:
    conversion, tensors = start(tmp_path, model, ranks)
    found: dict[str, torch.Tensor] = {}
    for keys in conversion.entries():
        wholes = []
        for key in keys:
            whole = conversion.from_hugging_face(key, tensors)
            shards = [shard_of(key, whole, ranks, i) for i in range(ranks)]
            if ranks > 1 and shard_axis(key) is not None:
                assert sum(shard.numel() for shard in shards) == whole.numel()
            wholes.append(merge_shards(key, shards))
        found |= dict(conversion.to_hugging_face(keys, wholes))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", MEGATRON)
def test_files_as_on_the_hub_are_read_under_the_names_of_transformers(tmp_path: Path, name: str) -> None:
    conversion, _ = start(tmp_path, MEGATRON[name], 1)
    tensors = tensors_of(save_random(config := config_of(tmp_path, MEGATRON[name])))
    assert_reads(conversion, stored_weights(config.model_path), tensors)


def test_experts_are_stored_separately(tmp_path: Path) -> None:
    config = config_of(tmp_path, MEGATRON["mixtral"])
    save_random(config)
    with safetensors.safe_open(next(config.model_path.glob("*.safetensors")), framework="pt") as file:
        assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in file.keys()  # noqa: SIM118 not a mapping


def test_missing_tensor_or_unexpected_shape_is_named(tmp_path: Path) -> None:
    conversion, tensors = start(tmp_path, DENSE, 1)
    name = "model.layers.1.self_attn.k_proj.weight"
    key = "layers.1.self_attention.linear_qkv.weight"
    with pytest.raises(ConfigError, match=f"{name} has shape \\[3, 32\\], .*\\[32, 32\\]"):
        conversion.from_hugging_face(key, tensors | {name: torch.zeros(3, 32)})
    del tensors[name]
    with pytest.raises(ConfigError, match=f"no tensor {name}"):
        conversion.from_hugging_face(key, tensors)
