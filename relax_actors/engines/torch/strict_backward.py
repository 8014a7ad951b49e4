"""Backward passes of kernels that have a deterministic form, which only a strict setting of torch chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def strict_backward(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Compute `compute(*inputs)`; with run.deterministic its backward pass takes deterministic kernels alone.

    `configure_torch` lets operations without a deterministic kernel pass with a warning, and with that setting
    FlashAttention adds up gradients in any order.

    Raises:
        RuntimeError: in the backward pass: an operation of `compute` has no deterministic kernel.
    """
    if not torch.are_deterministic_algorithms_enabled() or not torch.is_grad_enabled():
        return compute(*inputs)
    end: Callable[..., tuple[Tensor, ...]] = _EndStrict.apply
    begin: Callable[[Tensor], Tensor] = _BeginStrict.apply
    return begin(compute(*end(*inputs)))


def end_strict_backward() -> None:
    """Let operations pass with a warning again, after a backward pass that failed."""
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(mode=True, warn_only=True)


class _BeginStrict(torch.autograd.Function):
    """Passes its input; the backward pass of what was computed before it is strict."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:  # noqa: ARG004 nothing is saved
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        torch.use_deterministic_algorithms(mode=True)
        return gradients[0]


class _EndStrict(torch.autograd.Function):
    """Passes its inputs; their gradients, which come last, end the strict part."""

    @staticmethod
    def forward(context: Any, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        return gradients
