"""Modules of a transformers model that an adapter concerns, and the random numbers that it starts from."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from relax_actors.data.adapter import HEADS, AdapterForm, AdapterModules, match_saved, match_targets
from relax_actors.data.adapter_check import MATRIX
from relax_actors.engines.torch.lora_experts import adaptable
from relax_actors.runtime.seeds import derive_seed


def modules_of(model: nn.Module, form: AdapterForm, heads: Collection[str] = ()) -> AdapterModules:
    """Return the modules of a transformers model, with or without memory, that an adapter concerns.

    `heads` are trained as a whole besides those of `form`.

    Raises:
        ConfigError: a target or module matches nothing.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    experts = [tensor for name, module in model.named_modules() for tensor in adaptable(name, module)]
    modules = [name.rpartition(".")[0] for name, _ in model.named_parameters()]
    # A model of scores or values has no head for tokens.
    saved = [name for name in form.saved if not heads or name.rpartition(".")[2] not in HEADS]
    whole = (*match_saved(modules, saved), *heads)
    targets = tuple(name for name in match_targets(linear, modules, form.targets, experts) if name not in whole)
    return AdapterModules(form, targets, whole, (*linear, *experts))


def drawn_down(seed: int, name: str, shape: Sequence[int]) -> Tensor:
    """Return A of a layer, `[rank, inputs] float32`, drawn as PEFT draws it from a seed and the layer's name.

    That of experts, `[experts, rank, inputs]`, is drawn expert by expert.
    """
    if len(shape) > MATRIX:
        return torch.stack([drawn_down(seed, f"{name}.{n}", shape[1:]) for n in range(shape[0])])
    random = torch.Generator().manual_seed(derive_seed(seed, "adapter", name))
    down = torch.empty(*shape)
    return nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=random)
