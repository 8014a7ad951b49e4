"""Fingerprint of the published weights that a checkpoint, model folder or weight file holds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from relax_actors.engines.torch.model import build, read_folder
from relax_actors.errors import ConfigError
from relax_actors.media.family import family_of
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import published_dtype


def fingerprint_of(path: Path, *more: Path) -> str:
    """Return the fingerprint of published weights.

    A checkpoint of the torch engine holds the float32 weights of the optimizer: they are rounded to the precision of
    the run first. The files of a model folder hold each expert as tensors of its own, while published weights hold
    those of a layer as one, and those of some multimodal models have other names: transformers converts them.

    Args:
        path: safetensors file with a full set of weights, model folder, or checkpoint.
        more: other files of the set, if its first one does not hold all of it.

    Raises:
        ConfigError: there are no weights, or no full set.
        StoreError: a file cannot be read.
    """
    shards = [path, *more] if path.is_file() else sorted(path.glob("model*.safetensors"))
    engine = _json(path / weights.ENGINE)
    if not shards and engine:
        msg = (
            f"{path} is a checkpoint of the engine {engine.get('engine')!r}, which holds parts of tensors; give the "
            "model folder that the run writes at its end, or a file with a full set of weights from its store"
        )
        raise ConfigError(msg)
    if not shards:
        msg = f"{path} holds no weights; give a checkpoint or model folder with model*.safetensors"
        raise ConfigError(msg)
    for shard in shards:
        if (base := weights.delta_base(shard)) is not None:
            msg = f"{shard} holds only the changes to the weights with fingerprint {base}; give a file with a full set"
            raise ConfigError(msg)
    tensors = weights.load(shards)
    if (path / "config.json").is_file() and _is_converted(path, tensors):
        tensors = read_folder(build(path), path)
    dtype = getattr(torch, engine["precision"]) if "precision" in engine else None
    return weights.fingerprint(
        {name: t if dtype is None else t.to(published_dtype(name, dtype)) for name, t in tensors.items()}
    )


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is no such file."""
    body: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return body


def _is_converted(folder: Path, names: Iterable[str]) -> bool:
    """Whether the files of a model folder may have other names than the weights in memory."""
    return any(".experts.0." in name for name in names) or family_of(folder) is not None
