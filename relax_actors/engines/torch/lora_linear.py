"""Linear layers with low-rank adapters in slots, of which one at a time computes (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from relax_actors.runtime.seeds import derive_seed

SLOTS = ".slots."
"""Part of the names of all weights of adapters in a model, behind the name of the layer."""
POLICY = "policy"
"""Slot of the adapter in training."""
REFERENCE = "reference"
"""Slot of the adapter of version 0, where it is not zero."""


class Switch:
    """Which slot of a model's adapters computes, and how inputs are dropped; all layers of a model share it.

    Attributes:
        slot: name of the slot; None for the model without an adapter.
        seed: seed of the dropped inputs; None to drop none.
    """

    def __init__(self) -> None:
        self.slot: str | None = POLICY
        self.seed: int | None = None

    @contextmanager
    def using(self, slot: str | None) -> Iterator[None]:
        """Compute with another slot, or without an adapter."""
        before, self.slot = self.slot, slot
        try:
            yield
        finally:
            self.slot = before

    @contextmanager
    def dropping(self, seed: int) -> Iterator[None]:
        """Drop inputs as a seed says, also where the backward pass computes layers again."""
        self.seed = seed
        try:
            yield
        finally:
            self.seed = None


class LowRank(nn.Module):
    """Matrices A and B of one layer and slot.

    Args:
        rank: rank.
        layer: layer whose output B A x is added to.
        dtype: dtype of A and B.

    Attributes:
        down: A, `[rank, in]`.
        up: B, `[out, rank]`.
    """

    def __init__(self, rank: int, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        device = layer.weight.device
        self.down = nn.Parameter(torch.zeros(rank, layer.in_features, dtype=dtype, device=device))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=dtype, device=device))


class LoraLinear(nn.Linear):
    """A linear layer that takes the place of another one and shares its weights: W x + b + s B A drop(x).

    The added part is computed in the order of PEFT's, so that both give the same bits in float32 on a CPU.

    Args:
        layer: the layer.
        name: its name in the model, from which the seed of its dropped inputs follows.
        scale: s.
        dropout: share of the inputs of A that are dropped.
        switch: of the model.
    """

    def __init__(self, layer: nn.Linear, name: str, *, scale: float, dropout: float, switch: Switch) -> None:
        nn.Module.__init__(self)  # the weights are those of `layer`
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.slots = nn.ModuleDict()
        self.scale, self._name, self._dropout, self._switch = scale, name, dropout, switch

    def of_slot(self, slot: str) -> LowRank:
        """Return A and B of a slot."""
        return cast("LowRank", self.slots[slot])

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer with the adapter of the slot in use."""
        base = super().forward(x)
        if self._switch.slot is None:
            return base
        adapter = self.of_slot(self._switch.slot)
        low = functional.linear(self._dropped(x.to(adapter.down.dtype)), adapter.down)
        return base + functional.linear(low, adapter.up) * self.scale

    def _dropped(self, x: Tensor) -> Tensor:
        if self._switch.seed is None or not self._dropout:
            return x
        random = torch.Generator(x.device).manual_seed(derive_seed(self._switch.seed, self._name))
        kept = torch.empty_like(x).bernoulli_(1 - self._dropout, generator=random)
        return x * kept / (1 - self._dropout)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return W + s B A of the slot in use, in the dtype of W; computed in float32."""
        assert self._switch.slot is not None  # noqa: S101 the caller merges an adapter
        adapter = self.of_slot(self._switch.slot)
        return merge(self.weight, adapter.down, adapter.up, self.scale)


def merge(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return W + s B A in the dtype of W; computed in float32."""
    return (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
