"""Memory of a model's modules: models without any, and random weights that are drawn one module after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import PreTrainedModel

from relax_actors.engines.torch.model import tensors_of

_DRAWN = 65521
"""Different numbers that weights have before they are loaded; a prime, so that rows of a matrix differ."""


@contextmanager
def without_memory() -> Iterator[None]:
    """Leave parameters without memory while a model is built; buffers get their values."""

    def to_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return parameter if parameter is None or parameter.is_meta else _meta(parameter)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        handle.remove()


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Fill parameters without memory with numbers, the same on all ranks, and move buffers to the device."""
    drawn = 0.02 * torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0))
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied weights once
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.is_meta and parameter not in made:
                times = -(-parameter.numel() // _DRAWN)
                values = drawn.to(device, parameter.dtype).repeat(times)[: parameter.numel()].view(parameter.shape)
                made[parameter] = nn.Parameter(values.clone(), requires_grad=parameter.requires_grad)
            if parameter in made:
                setattr(part, name, made[parameter])
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))


def draw(make: Callable[[], PreTrainedModel], part: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Draw the random weights of a model, and keep a part of each.

    The numbers are those of a model that is built whole: each module gets memory when its constructor and its
    initialisation draw, in the same order.

    Args:
        make: builds the model on the CPU.
        part: returns a copy of the part to keep of a tensor.

    Returns:
        The parts of weights, and whole buffers, by name; tied weights once, under their first name.
    """
    drawing, initialise = _Drawing(part), PreTrainedModel._initialize_weights  # noqa: SLF001 there is no public way

    def initialise_alone(model: PreTrainedModel, module: nn.Module, *arguments: Any) -> None:
        drawing.initialise(module, partial(initialise, model, module, *arguments))

    handle = register_module_module_registration_hook(drawing.shrink)
    PreTrainedModel._initialize_weights = initialise_alone  # type: ignore[method-assign,assignment]  # noqa: SLF001
    try:
        model = make()
    finally:
        PreTrainedModel._initialize_weights = initialise  # type: ignore[method-assign]  # noqa: SLF001
        handle.remove()
    for module in model.modules():
        drawing.shrink(module, "", module)
    return {name: drawing.kept.get(tensor, tensor) for name, tensor in _named(model).items()}


class _Drawing:
    """Parts of the weights that were drawn so far, by the parameters without memory that stand for them."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        self._part = part
        self.kept: dict[Tensor, Tensor] = {}

    def shrink(self, _: nn.Module, __: str, module: nn.Module | None) -> None:
        """Take the memory of the weights of a module, whose constructor or initialisation has ended."""
        for name, parameter in [] if module is None else list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                empty = _meta(parameter)
                self.kept[empty] = self._part(parameter.detach())
                setattr(module, name, empty)

    def initialise(self, module: nn.Module, initialise: Callable[[], None]) -> None:
        """Initialise the weights of a module; some models draw those of its children again."""
        if getattr(module, "_is_hf_initialized", False):
            return
        modules = [module, *module.children()]
        before = {(one, name): p for one in modules for name, p in one.named_parameters(recurse=False) if p.is_meta}
        for (one, name), parameter in before.items():
            setattr(one, name, nn.Parameter(torch.full_like(parameter, math.nan, device="cpu")))
        initialise()
        for (one, name), parameter in before.items():
            if getattr(one, name).isnan().any():  # not drawn now
                setattr(one, name, parameter)
            else:
                self.kept.pop(parameter, None)
        for one in modules:
            self.shrink(one, "", one)


def _named(model: PreTrainedModel) -> dict[str, Tensor]:
    known = model.state_dict(keep_vars=True)
    return {name: known[name] for name in tensors_of(model)}


def _meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
