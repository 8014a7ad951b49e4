"""Models in the Hugging Face format, built the same way by every engine that runs them in torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from relax_actors.errors import ConfigError


def build(
    path: Path, *, seed: int | None = None, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The model of a folder's config.json; random weights drawn from `seed` on the CPU, then moved to `device`.

    Raises:
        ConfigError: the folder holds no model that transformers can build.
    """
    try:
        config = AutoConfig.from_pretrained(path)
        if seed is not None:
            torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation="sdpa", dtype=dtype
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = f"model.path {path} holds no model that can be built: {error}"
        raise ConfigError(msg) from error
    model.to(device)  # type: ignore[arg-type]
    return model


def has_weights(path: Path) -> bool:
    """Whether a model folder brings weights."""
    return any(path.glob("*.safetensors"))


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's weights by their Hugging Face names; tied ones once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = tensor
    return found


@torch.no_grad()
def copy_into(model: PreTrainedModel, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy tensors over the model's own; see `check_fit` for the errors."""
    known = check_fit(model, tensors, source)
    for name, tensor in tensors.items():
        known[name].copy_(tensor)


def check_fit(model: PreTrainedModel, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The model's own parameters and buffers by all their names, if `tensors` can take the place of each.

    Raises:
        ConfigError: a tensor is missing, unknown or of another shape; names it.
    """
    own = tensors_of(model)
    known: dict[str, Tensor] = model.state_dict(keep_vars=True)
    missing, unknown = own.keys() - tensors.keys(), tensors.keys() - known.keys()
    # A tied tensor may be stored under its other name.
    missing -= {n for n in missing if any(known[t].data_ptr() == own[n].data_ptr() for t in tensors if t in known)}
    if missing or unknown:
        msg = f"weights of {source} do not fit the model: missing {sorted(missing)[:5]}, unknown {sorted(unknown)[:5]}"
        raise ConfigError(msg)
    for name, tensor in tensors.items():
        if known[name].shape != tensor.shape:
            msg = f"weights of {source}: {name} is {list(tensor.shape)}, the model has {list(known[name].shape)}"
            raise ConfigError(msg)
    return known


def context_length(model: PreTrainedModel) -> int:
    """Tokens that the model's positions reach."""
    return int(getattr(model.config, "max_position_embeddings", 1 << 20))
