"""Weights that are not trained: a parameter of megatron-core may hold several of Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from relax_actors.engines.megatron.conversion import EMBEDDING, Conversion
from relax_actors.engines.torch.frozen import frozen_names
from relax_actors.errors import ConfigError


def freeze(
    models: Sequence[Any], parameters: Mapping[str, Tensor], conversion: Conversion, patterns: Sequence[str]
) -> None:
    """Take gradients from the parameters that patterns match; before the optimizer is made.

    Args:
        models: the stages of this rank.
        parameters: of these, by key.
        conversion: between keys and names.
        patterns: of Hugging Face names.

    Raises:
        ConfigError: a pattern matches nothing, or a part of a parameter, or nothing is left to train here.
    """
    if not patterns:
        return
    found = frozen_names({name for keys in conversion.entries() for name in conversion.names(keys)}, patterns)
    for key, parameter in parameters.items():
        names = set(conversion.names((key,)))
        if names <= found:
            parameter.requires_grad_(False)
        elif names & found:
            msg = (
                f"trainer.freeze matches {sorted(names & found)}, which Megatron-Core keeps as one parameter with "
                f"{sorted(names - found)}; match all of them or none"
            )
            raise ConfigError(msg)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        msg = "trainer.freeze leaves a stage of the pipeline nothing to train; lower pipeline_parallel, or freeze less"
        raise ConfigError(msg)
    if EMBEDDING in parameters and not parameters[EMBEDDING].requires_grad:
        for model in models:
            if model.pre_process:
                # Activations that are computed again in backward get gradients only if what goes in has some.
                model.embedding.register_forward_hook(_with_gradient)


def _with_gradient(_: Any, __: Any, embedded: Tensor) -> Tensor:
    return embedded.requires_grad_()
