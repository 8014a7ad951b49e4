"""Tensors of an adapter in the files of PEFT, which joins the matrices of the experts of a layer.

Of E experts, A is `[E * rank, in]` there, expert by expert, and B `[out, rank * E]`, whose columns are those of rank 0
of all experts first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from relax_actors.data.adapter import (
    DOWN,
    EXPERT,
    EXPERTS_DOWN,
    GATE_UP,
    INNER,
    PREFIX,
    UP,
    WEIGHTS,
    of_experts,
    own_names,
)
from relax_actors.weights import files as weights


def read_adapter(folder: Path, rank: int) -> dict[str, Tensor]:
    """Return the tensors in a PEFT folder by our names; raises ConfigError as `own_names`, StoreError as `load`."""
    stored = weights.load([folder / WEIGHTS])
    return {name: _from_peft(name, stored[given], rank) for name, given in own_names(folder).items()}


def _from_peft(name: str, tensor: Tensor, rank: int) -> Tensor:
    layer, end = _split(name)
    if not of_experts(layer):
        return tensor
    if end == DOWN:
        return tensor.reshape(-1, rank, tensor.shape[1])
    return tensor.reshape(tensor.shape[0], rank, -1).permute(2, 0, 1).contiguous()


def to_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an adapter by PEFT's names, in its form."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, end = _split(name)
        if not of_experts(layer):
            stored[PREFIX + name] = tensor
            continue
        module = layer.removesuffix(GATE_UP).removesuffix(EXPERTS_DOWN) + EXPERT[:-1]
        is_inner = layer.endswith(GATE_UP) and module.removesuffix(EXPERT[:-1]) + EXPERTS_DOWN + end in tensors
        form = tensor.flatten(0, 1) if end == DOWN else tensor.permute(1, 2, 0).flatten(1)
        stored[PREFIX + module + (INNER if is_inner else "") + end] = form.contiguous()
    return stored


def _split(name: str) -> tuple[str, str]:
    end = next((end for end in (DOWN, UP) if name.endswith(end)), "")
    return name.removesuffix(end), end
