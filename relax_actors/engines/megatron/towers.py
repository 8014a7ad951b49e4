"""Towers of a multimodal model: the modules of transformers, without decoder and head."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from relax_actors.engines.torch.model import build

_DECODER, _HEAD = ("language_model", "layers", "embed_tokens", "norm"), "lm_head"


def build_towers(folder: Path, device: torch.device | str) -> PreTrainedModel:
    """Build the towers of a model folder with arbitrary weights.

    Weights have their names in the whole model. Dropout is disabled, as in the torch engine.
    """
    model = build_without_layers(folder, device)
    for owner in (model, model.model):
        for name in _DECODER if owner is not model else (_HEAD,):
            if isinstance(getattr(owner, name, None), nn.Module):
                delattr(owner, name)
    model.train(mode=False)
    return model


def build_without_layers(folder: Path, device: torch.device | str) -> PreTrainedModel:
    """Build a multimodal model whose decoder has no layers and one token, so that it takes little memory."""

    def shrink(config: Any) -> Any:
        small = deepcopy(config)
        text = small.get_text_config()
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = []
        return small

    return build(folder, device=device, change=shrink)


def tower_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the towers' weights by Hugging Face name, in order."""
    with torch.device("meta"):
        model = build_towers(folder, "meta")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def float32_buffers(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Return the buffers in float32, such as frequencies of rotary positions, with their modules and names."""
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.dtype == torch.float32
    ]
