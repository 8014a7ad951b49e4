"""Build transformers models from model folders, and copy weights into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from relax_actors.errors import ConfigError
from relax_actors.media.families import FAMILIES
from relax_actors.media.family import family_of
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import published_dtype

VOICE = tuple(prefix for spec in FAMILIES.values() for prefix in spec.voice)
"""Parts of the files of an omni model that write speech; they are not trained."""


def build(
    path: Path,
    *,
    seed: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = "cpu",
    change: Callable[[PreTrainedConfig], PreTrainedConfig] = lambda config: config,
) -> PreTrainedModel:
    """Build the model of a folder's config.json with random weights, on the CPU, then move it to `device`, if given.

    The seed gives the same weights on any device; without it torch's random state stays alone. For `dtype` see
    `published_dtype`. `change` returns the config to build in place of the folder's.

    Raises:
        ConfigError: transformers cannot build a model from the folder.
    """
    try:
        config, auto = (
            change(config_of(path)),
            AutoModelForCausalLM if family_of(path) is None else AutoModelForMultimodalLM,
        )
        if seed is not None:
            torch.manual_seed(seed)
        # The attention is transformers' choice: SDPA, or for a model with sinks its own.
        model: PreTrainedModel = auto.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        for name, buffer in model.named_buffers():
            buffer.data = buffer.data.to(published_dtype(name, buffer.dtype))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"model.path {path} holds no model that transformers can build: {error}"
        raise ConfigError(msg) from error
    if device is not None:
        model.to(device)  # type: ignore[arg-type]
    return model


def config_of(path: Path, **settings: Any) -> PreTrainedConfig:
    """Read a config.json; of a model that also speaks, the part that reads and writes text."""
    config = AutoConfig.from_pretrained(path, **settings)
    thinker: PreTrainedConfig = getattr(config, "thinker_config", config)
    return thinker


def build_critic(path: Path, *, seed: int, device: torch.device | str | None = "cpu") -> PreTrainedModel:
    """Build the architecture of a folder, of a policy or a critic, with a value head instead of the head for tokens.

    Raises:
        ConfigError: transformers cannot build such a model from the folder.
    """
    model: PreTrainedModel
    try:
        if family_of(path) is not None:
            model = _multimodal_critic(path, seed)
        else:
            config = config_of(path, num_labels=1)
            torch.manual_seed(seed)
            model = AutoModelForTokenClassification.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation="sdpa", dtype=torch.float32
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"critic: {path} holds no model that transformers can build with a value head: {error}"
        raise ConfigError(msg) from error
    if device is not None:
        model.to(device)  # type: ignore[arg-type]
    return model


def _multimodal_critic(path: Path, seed: int) -> PreTrainedModel:
    """Build a multimodal model whose head computes one number; transformers has none with a value head."""
    model = build(path, seed=seed, device=None)
    model.config.tie_word_embeddings = False
    width = int(model.config.get_text_config().hidden_size)
    model.set_output_embeddings(torch.nn.Linear(width, 1, bias=False))  # type: ignore[no-untyped-call]
    return model


def save_critic(model: PreTrainedModel, folder: Path) -> None:
    """Write a model of `build_critic` as a folder that critic.path can name.

    It is a token-classification folder with one label, which transformers loads; transformers has no such class for
    multimodal models, whose files therefore hold the names of the critic itself.

    Raises:
        OSError: writing failed; errno is ENOSPC if the disk is full.
    """
    with weights.disk_errors(folder):
        if hasattr(model, "score"):
            model.save_pretrained(folder)
        else:
            model.config.save_pretrained(folder)
            weights.save(tensors_of(model), folder / "model.safetensors")


def has_weights(path: Path) -> bool:
    """Return whether a model folder contains weights."""
    return any(path.glob("*.safetensors"))


def read_folder(model: PreTrainedModel, path: Path) -> dict[str, Tensor]:
    """Read the weights of a model folder by the names that they have in `model`.

    The files of some models have other names, or hold each expert as tensors of its own, and those of a model that also
    speaks hold its voice: transformers converts them. Weights that fit in no way are returned as they are, so that
    `copy_into` names the difference.

    Raises:
        StoreError: a file cannot be read.
    """
    tensors = weights.load(sorted(path.glob("*.safetensors")))
    if tensors.keys() <= model.state_dict().keys():
        return tensors
    read: Any = type(model).from_pretrained
    settings = {"dtype": "auto", "output_loading_info": True, "ignore_mismatched_sizes": True}
    # A config of its own: that of `model` has the dtype of `model`, not that of the files.
    converted, report = read(path, config=config_of(path), **settings)
    unexpected = [name for name in report["unexpected_keys"] if not name.startswith(VOICE)]
    if report["missing_keys"] or report["mismatched_keys"] or unexpected:
        return tensors
    return tensors_of(converted)


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights by Hugging Face name; tied weights once, under their first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


@torch.no_grad()
def copy_into(model: PreTrainedModel, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy tensors into the weights of a model, each read once; errors as `check_fit`, which names `source`.

    A model that ranks share takes the rows of this rank.
    """
    known = _check_names(model, tensors, source)
    for name, tensor in tensors.items():
        _check_shape(name, tensor, known[name], source)
        copy_tensor(known[name], tensor)


def is_shared(tensor: Tensor) -> bool:
    """Return whether ranks share a tensor; its class is not imported, which takes long."""
    return hasattr(tensor, "device_mesh")


@torch.no_grad()
def copy_tensor(own: Any, tensor: Any) -> None:
    """Copy a tensor into a second, of which this rank may have some rows only."""
    if not is_shared(own):
        own.copy_(tensor)
    else:
        own.to_local().copy_(tensor.to_local() if is_shared(tensor) else tensor[own_rows(own)])


def own_rows(tensor: Any) -> slice:
    """Return the rows of a shared tensor that this rank has: as many as the others, but the last ones fewer or none."""
    return rows_of(tensor.shape[0], tensor.device_mesh.get_local_rank(), tensor.device_mesh.size())


def rows_of(rows: int, rank: int, ranks: int) -> slice:
    """Return which of the rows of a tensor a rank has."""
    most = -(-rows // ranks)
    first = min(rows, rank * most)
    return slice(first, min(rows, first + most))


def check_fit(model: PreTrainedModel, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Check that `tensors` are a full set of weights of the model.

    Args:
        model: the model.
        tensors: weights by Hugging Face names; tied weights may have any of their names.
        source: origin of the tensors, for errors.

    Returns:
        All parameters and buffers of the model by name, tied ones under each of their names.

    Raises:
        ConfigError: a tensor is missing, unknown or of another shape; the error names it.
    """
    known = _check_names(model, tensors, source)
    for name, tensor in tensors.items():
        _check_shape(name, tensor, known[name], source)
    return known


def _check_names(model: PreTrainedModel, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    known: dict[str, Tensor] = model.state_dict(keep_vars=True)
    unknown = tensors.keys() - known.keys()
    # Tied weights may be stored under another of their names.
    given = {id(known[name]) for name in tensors if name in known}
    missing = {name for name in tensors_of(model) if id(known[name]) not in given}
    if missing or unknown:
        msg = f"weights of {source} do not fit the model: missing {sorted(missing)[:5]}, unknown {sorted(unknown)[:5]}"
        raise ConfigError(msg)
    return known


def _check_shape(name: str, tensor: Tensor, known: Tensor, source: str) -> None:
    if known.shape != tensor.shape:
        msg = f"weights of {source}: {name} has shape {list(tensor.shape)}, not {list(known.shape)}"
        raise ConfigError(msg)


def context_length(model: PreTrainedModel) -> int:
    """Return the largest number of tokens of prompt and completion together."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 20))
