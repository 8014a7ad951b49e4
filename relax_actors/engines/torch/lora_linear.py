"""Linear layers with low-rank adapters in slots, of which one at a time computes (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
    """Matrices of one layer and slot, both 0 and in float32: `down` is A `[rank, in]`, `up` is B `[out, rank]`.

    Those of `experts` have one more axis, the first.
    """

    def __init__(self, rank: int, inputs: int, outputs: int, device: torch.device, experts: int | None = None) -> None:
        super().__init__()
        first = () if experts is None else (experts,)
        self.down = nn.Parameter(torch.zeros(*first, rank, inputs, device=device))
        self.up = nn.Parameter(torch.zeros(*first, outputs, rank, device=device))


class LoraLinear(nn.Linear):
    """A linear layer with adapters, which `adapt` makes of a plain one: W x + b + s B A drop(x).

    The added part is computed in the order of PEFT's, so that both give the same bits in float32 on a CPU.
    """

    slots: nn.ModuleDict
    scale: float
    switch: Switch
    drop: Callable[..., Tensor]

    @classmethod
    def adapt(cls, layer: nn.Linear, name: str, *, scale: float, dropout: float, switch: Switch) -> LoraLinear:
        """Give a linear layer adapters, in place: FSDP2 replaces the weights of the modules that it was given.

        The seed of its dropped inputs, a share `dropout` of those of A, follows from its name in the model. `scale` is
        s.
        """
        layer.__class__ = cls
        adapted = cast("LoraLinear", layer)
        adapted.slots, adapted.scale, adapted.drop = nn.ModuleDict(), scale, partial(dropped, share=dropout, name=name)
        adapted.switch = switch
        return adapted

    def add_slot(self, slot: str, rank: int, device: torch.device) -> LowRank:
        """Add a slot whose A and B are 0."""
        self.slots[slot] = LowRank(rank, self.in_features, self.out_features, device)
        return self.of_slot(slot)

    def of_slot(self, slot: str) -> LowRank:
        """Return A and B of a slot."""
        return cast("LowRank", self.slots[slot])

    def cast(self, dtype: torch.dtype) -> None:
        """Keep the frozen weight and bias in another dtype."""
        self.weight.data = self.weight.data.to(dtype)
        if self.bias is not None:
            self.bias.data = self.bias.data.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer with the adapter of the slot in use."""
        base = super().forward(x)
        if self.switch.slot is None:
            return base
        adapter = self.of_slot(self.switch.slot)
        x = self.drop(x.to(adapter.down.dtype), seed=self.switch.seed)
        return base + functional.linear(functional.linear(x, adapter.down), adapter.up) * self.scale

    @torch.no_grad()
    def merged(self, weight: Tensor | None = None) -> Tensor:
        """Return W + s B A of the slot in use, in the dtype of W, the layer's own by default; computed in float32."""
        assert self.switch.slot is not None  # noqa: S101 the caller merges an adapter
        adapter = self.of_slot(self.switch.slot)
        return merge(self.weight if weight is None else weight, adapter.down, adapter.up, self.scale)


def dropped(x: Tensor, *, share: float, seed: int | None, name: str) -> Tensor:
    """Return inputs of which a share is 0, and the others divided by 1 - share.

    `name`, such as that of a layer, draws them with the seed of the pass; without a seed nothing is dropped.
    """
    if seed is None or not share:
        return x
    random = torch.Generator(x.device).manual_seed(derive_seed(seed, name))
    return x * torch.empty_like(x).bernoulli_(1 - share, generator=random) / (1 - share)


def merge(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return W + s B A in the dtype of W, of one matrix or of each expert; computed in float32."""
    return (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
