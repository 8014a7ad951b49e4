"""Activation checkpointing: the backward pass recomputes each layer from its input, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from relax_actors.engines.torch.experts import Routers
from relax_actors.errors import ConfigError

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def recompute_layers(model: PreTrainedModel, routers: Routers | None = None) -> None:
    """Keep the inputs of the layers of decoder and towers only; their activations are computed again in backward.

    transformers' own switch works in training mode only, where dropout is on. The layers are changed, and the replayed
    experts of `routers` are replayed again.

    Raises:
        ConfigError: transformers names no layer of the model whose activations can be recomputed.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        kind = model.config.model_type
        msg = f'trainer.recompute: the transformers model {kind} names no layers to recompute; set it to "none"'
        raise ConfigError(msg)
    for layer in layers:
        _recompute(layer, _no_contexts if routers is None else routers.contexts_of_recomputation)


def _recompute(layer: nn.Module, contexts: Callable[[], Contexts]) -> None:
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    layer.forward = partial(checkpoint, layer.forward, **settings)


def _no_contexts() -> Contexts:
    return nullcontext(), nullcontext()
