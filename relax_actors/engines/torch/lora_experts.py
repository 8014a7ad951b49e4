"""Experts of a layer with low-rank adapters: each has an A and a B of its own, in slots as those of linear layers.

The products with A and B are computed beside those with the weights, for the rows of each expert. PEFT instead adds
B A to the weights of all experts in each pass (`target_parameters`); the numbers are the same, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from relax_actors.data.adapter import EXPERTS_DOWN, GATE_UP
from relax_actors.engines.torch.lora_linear import LowRank, Switch, merge

PARTS = (GATE_UP.rpartition(".")[2], EXPERTS_DOWN.rpartition(".")[2])
"""Names of the tensors in a module of experts: gate and up projection, and down projection."""
ALIGNED = 16
"""Bytes of which the rows of matrices are multiples where torch's kernel multiplies those of all experts."""


class LoraExperts(nn.Module):
    """Experts with adapters of one or both of their tensors, which `adapt` makes of a module of transformers."""

    slots: nn.ModuleDict
    scale: float
    switch: Switch
    num_experts: int

    @classmethod
    def adapt(cls, experts: nn.Module, *, scale: float, switch: Switch) -> LoraExperts:
        """Let experts have adapters, in place; does nothing if they may have some already. `scale` is s."""
        if not isinstance(experts, cls):
            family = type(experts)
            experts.__class__ = type(f"Lora{family.__name__}", (cls, family), {})
            adapted = cast("LoraExperts", experts)
            adapted.slots, adapted.scale, adapted.switch = nn.ModuleDict(), scale, switch
        return cast("LoraExperts", experts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of each token with the adapters of the slot in use, `[tokens, hidden]`.

        Args:
            hidden_states: `[tokens, hidden]`.
            top_k_index: experts of each token, `[tokens, experts_of_token] int64`.
            top_k_weights: their weights, `[tokens, experts_of_token]`.
        """
        if self.switch.slot is None:
            return cast("Tensor", super().forward(hidden_states, top_k_index, top_k_weights))
        chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
        ends = torch.searchsorted(chosen, torch.arange(self.num_experts, device=chosen.device), right=True)
        inner = self._computed(PARTS[0], hidden_states[order // top_k_index.shape[1]], ends)
        outer = self._computed(PARTS[1], cast("Any", self)._apply_gate(inner), ends)  # noqa: SLF001 of the family's class
        weighted = outer * top_k_weights.reshape(-1)[order, None]
        of_tokens = torch.empty_like(weighted).index_copy(0, order, weighted)
        return of_tokens.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)

    def _computed(self, part: str, x: Tensor, ends: Tensor) -> Tensor:
        """Return the products of rows with the matrix of their expert, that of the adapter included."""
        weight: Tensor = getattr(self, part)
        base = grouped(x, weight, ends)
        if part not in self.slots:
            return base
        adapter = self.of_slot(part, cast("str", self.switch.slot))
        low = grouped(x, adapter.down.to(weight.dtype), ends)
        return base + grouped(low, adapter.up.to(weight.dtype), ends) * self.scale

    def of_slot(self, part: str, slot: str) -> LowRank:
        """Return A and B of a tensor and slot."""
        return cast("LowRank", cast("nn.ModuleDict", self.slots[part])[slot])


class ExpertTensor:
    """A tensor of experts as a layer with an adapter; has the methods of `LoraLinear`.

    Args:
        experts: module of the experts.
        part: name of the tensor in it, see `PARTS`.
    """

    def __init__(self, experts: LoraExperts, part: str) -> None:
        self._experts, self._part = experts, part

    @property
    def weight(self) -> Tensor:
        """The tensor, `[experts, out, in]`."""
        return cast("Tensor", getattr(self._experts, self._part))

    def add_slot(self, slot: str, rank: int, device: torch.device) -> LowRank:
        """Add a slot whose A and B are 0."""
        slots = self._experts.slots
        if self._part not in slots:
            slots[self._part] = nn.ModuleDict()
        count, outputs, inputs = self.weight.shape
        cast("nn.ModuleDict", slots[self._part])[slot] = LowRank(rank, inputs, outputs, device, count)
        return self.of_slot(slot)

    def of_slot(self, slot: str) -> LowRank:
        """Return A and B of a slot."""
        return self._experts.of_slot(self._part, slot)

    def cast(self, dtype: torch.dtype) -> None:
        """Keep the frozen tensor in another dtype, in which its products are then computed."""
        self.weight.data = self.weight.data.to(dtype)

    @torch.no_grad()
    def merged(self, weight: Tensor | None = None) -> Tensor:
        """Return W + s B A of the slot in use, in the dtype of W, the tensor itself by default."""
        assert self._experts.switch.slot is not None  # noqa: S101 the caller merges an adapter
        own = self.of_slot(self._experts.switch.slot)
        return merge(self.weight if weight is None else weight, own.down, own.up, self._experts.scale)


def adaptable(name: str, module: nn.Module) -> list[str]:
    """Return the names of the tensors of a module that can have adapters of experts."""
    facts: Any = module
    known = [isinstance(getattr(module, part, None), nn.Parameter) for part in PARTS]
    if not all(known) or not name.endswith(GATE_UP.rpartition(".")[0]) or not hasattr(module, "_apply_gate"):
        return []
    is_plain = facts.has_gate and facts.is_concatenated and not facts.is_transposed and not facts.has_bias
    return [f"{name}.{part}" for part in PARTS] if is_plain else []


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows by the matrix of their expert.

    Args:
        x: rows, ordered by expert, `[rows, in]`.
        weight: matrices, `[experts, out, in]`.
        ends: number of rows up to each expert's last one, `[experts] int64`.

    Returns:
        `[rows, out]` in the dtype of the matrices.
    """
    x = x.to(weight.dtype)
    if has_grouped_kernel(weight.device, weight.dtype, weight.shape[1:]):
        return functional.grouped_mm(x, weight.transpose(1, 2), offs=ends.int())
    spans = list(pairwise([0, *ends.tolist()]))
    parts = [functional.linear(x[a:b], own) for (a, b), own in zip(spans, weight.unbind(), strict=True) if b > a]
    return torch.cat(parts) if parts else x.new_zeros(0, weight.shape[1])


def has_grouped_kernel(device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    """Whether torch multiplies the rows of all experts in one kernel, for matrices of these sizes."""
    if device.type != "cuda" or dtype != torch.bfloat16 or not hasattr(functional, "grouped_mm"):
        return False
    is_aligned = all(size * dtype.itemsize % ALIGNED == 0 for size in sizes)
    return is_aligned and torch.cuda.get_device_capability(device) >= (8, 0)
