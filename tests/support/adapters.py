"""Configurations of runs that train an adapter of a tiny model with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from relax_actors.config import Config, validate
from relax_actors.engines.torch.model import build, tensors_of
from tests.support.models import QWEN3, config_of


def base_folder(folder: Path, architecture: dict[str, Any] = QWEN3, seed: int = 7) -> Path:
    """Write a model folder with tokenizer and weights, which are so large that distributions are far from uniform."""
    path = config_of(folder / "base", architecture).model_path
    save_file(
        {name: 2 * tensor for name, tensor in tensors_of(build(path, seed=seed)).items()}, path / "model.safetensors"
    )
    return path


def adapter_config(folder: Path, base: Path, lora: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """Configure a run in `folder` that trains an adapter of the model in `base`; arguments as `config_of`."""
    tree: dict[str, Any] = {
        "run": {"name": "tiny", "folder": str(folder), "seed": 5, "steps": 10},
        "model": {"path": str(base)},
        "data": {"kind": "python", "function": "nothing"},
        "trainer": {"learning_rate": 1e-2, "max_tokens_per_microbatch": 100},
        "lora": {"rank": 4} | (lora or {}),
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return validate(tree, "test")
