"""Lets SGLang's LoRA layers and their backend in torch compute without an accelerator.

Both put small index tensors into pinned memory, which torch allocates with an accelerator only. The two modules get
factories that allocate ordinary memory; other modules keep torch's own, which torch.jit must recognise.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from relax_sglang_cpu.on_import import change

MODULES = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")
FACTORIES = ("tensor", "zeros", "empty")


class _Torch(ModuleType):
    """torch, with factories that ignore `pin_memory`."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _without_pinning(found) if name in FACTORIES else found


def _without_pinning(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*args: Any, **given: Any) -> Tensor:
        given.pop("pin_memory", None)
        return factory(*args, **given)

    return make


def _patch(module: Any) -> None:
    module.torch = _Torch("torch")


def _stay(tensor: Tensor, *_: Any) -> Tensor:
    """Return a tensor in the memory where it is, in place of `Tensor.pin_memory`."""
    return tensor


def install() -> None:
    """Patch the modules that are imported, and the others on their import."""
    torch.Tensor.pin_memory = _stay  # type: ignore[method-assign]
    for name in MODULES:
        change(name, _patch)
