"""Tensors that leave their device for pinned host memory, and return."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def move_to_host(tensors: Iterable[Tensor]) -> int:
    """Move tensors that are on a GPU to pinned host memory, in place; return the bytes that became free there.

    Whoever reads such a tensor meanwhile reads the same numbers, from either place.
    """
    moved = [(tensor, _pinned(tensor)) for tensor in _unique(tensors) if tensor.is_cuda]
    if not moved:
        return 0
    for device in {tensor.device for tensor, _ in moved}:
        torch.cuda.synchronize(device)
    for tensor, host in moved:
        tensor.data = host
    torch.cuda.empty_cache()
    return sum(host.nbytes for _, host in moved)


def move_to_device(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Move tensors to a device, in place; return the bytes that were moved."""
    moved = 0
    for tensor in _unique(tensors):
        if tensor.device.type != device.type:
            tensor.data = tensor.data.to(device, non_blocking=True)
            moved += tensor.nbytes
    if moved:
        torch.cuda.synchronize(device)
    return moved


def _pinned(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor.data, device="cpu", pin_memory=True)
    return host.copy_(tensor.data, non_blocking=True)


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
