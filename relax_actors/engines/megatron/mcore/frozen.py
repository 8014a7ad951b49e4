"""Freezing of weights by Hugging Face name; a parameter may hold several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from relax_actors.engines.megatron.conversion import EMBEDDING, Conversion
from relax_actors.engines.torch.frozen import frozen_names
from relax_actors.errors import ConfigError


def freeze(
    models: Sequence[Any], parameters: Mapping[str, Tensor], conversion: Conversion, patterns: Sequence[str]
) -> None:
    """Disable gradients of parameters whose names match a shell pattern, before the optimizer is created.

    Raises:
        ConfigError: a pattern matches no weight or only part of a parameter, or this stage has nothing left to train.
    """
    if not patterns:
        return
    frozen = frozen_names({name for keys in conversion.entries() for name in conversion.names(keys)}, patterns)
    for key, parameter in parameters.items():
        names = set(conversion.names((key,)))
        if names <= frozen:
            parameter.requires_grad_(False)
        elif names & frozen:
            msg = (
                f"trainer.freeze matches {sorted(names & frozen)}, which Megatron-Core stores in one parameter with "
                f"{sorted(names - frozen)}; match all of them or none of them"
            )
            raise ConfigError(msg)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        msg = "trainer.freeze leaves nothing to train in a pipeline stage; lower pipeline_parallel, or freeze less"
        raise ConfigError(msg)
    if EMBEDDING in parameters and not parameters[EMBEDDING].requires_grad:
        for model in models:
            require_gradient_of_embeddings(model)


def freeze_padding(model: Any, padding: int) -> None:
    """Leave the embedding of the padding token without a gradient through the inputs, as transformers does."""
    if model.pre_process:
        model.embedding.word_embeddings.register_forward_hook(partial(_without_gradient, padding))


def _without_gradient(padding: int, layer: Any, inputs: tuple[Tensor], embedded: Tensor) -> Tensor:
    if not embedded.requires_grad:
        return embedded
    (tokens,) = inputs
    if layer.reduce_scatter_embeddings:  # `[length / ranks, rows, hidden]`, with sequence parallelism
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        tokens = tokens.T.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    return torch.where((tokens == padding)[..., None], embedded.detach(), embedded)


def require_gradient_of_embeddings(model: Any) -> None:
    """Let recomputed activations get gradients, which they do only if the input of their block requires one."""
    if model.pre_process:
        model.embedding.register_forward_hook(_require_gradient)


def _require_gradient(_: Any, __: Any, embedded: Tensor) -> Tensor:
    return embedded.requires_grad_()
