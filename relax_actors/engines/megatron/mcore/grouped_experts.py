"""Experts of a layer computed by two grouped matrix products, in place of two linear layers for each expert.

Modules, names and shards are those of megatron-core's `SequentialMLP`. The weights of all experts lie at equal
distances in memory, so that torch's kernel reads them where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.nn import functional

INNER, OUTER = "linear_fc1", "linear_fc2"
"""Layers of an expert: gate and up projection, and down projection."""


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """The experts that a rank has of a layer, without biases.

    Experts with adapters are computed one by one, because their linear layers add the adapters.
    """

    local_experts: nn.ModuleList

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.local_experts = LastFirst(self.local_experts)
        for layer in (INNER, OUTER):
            weights = self._weights(layer)
            for weight, row in zip(weights, torch.stack([weight.data for weight in weights]), strict=True):
                weight.data = row

    def _weights(self, layer: str) -> list[Tensor]:
        return [getattr(expert, layer).weight for expert in self.local_experts]

    @cached_property
    def _has_adapters(self) -> bool:
        """Whether an expert has one; they are added before the first pass."""
        return any(
            hasattr(getattr(expert, layer), "adapter") for expert in self.local_experts for layer in (INNER, OUTER)
        )

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Compute each row's expert.

        Args:
            permuted_local_hidden_states: rows, ordered by expert, `[rows, hidden]`.
            tokens_per_expert: rows of each expert, `[experts] int64`.
            permuted_probs: weights of the rows, `[rows] float32`.

        Returns:
            `[rows, hidden]`, and no bias.
        """
        x = permuted_local_hidden_states
        if not len(x) or self._has_adapters:
            return cast("tuple[Tensor, None]", super().forward(x, tokens_per_expert, permuted_probs))
        counts, ends = tokens_per_expert.tolist(), tokens_per_expert.cumsum(0).to(x.device, torch.int32)
        gate, up = grouped_product(x, ends, counts, self._weights(INNER)).chunk(2, -1)
        weighted = self.config.activation_func(gate) * up * permuted_probs[:, None]
        return grouped_product(weighted.to(x.dtype), ends, counts, self._weights(OUTER)), None


class LastFirst(nn.ModuleList):
    """Modules in their order, with the parameters of the last one first.

    megatron-core lays parameters out from the last to the first, and a tensor's strides cannot be negative.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, module in reversed(list(enumerate(modules))):
            self.add_module(str(number), module)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[number] for number in range(len(self)))


def grouped_product(x: Tensor, ends: Tensor, counts: list[int], weights: Sequence[Tensor]) -> Tensor:
    """Multiply rows by the matrix of their expert.

    Args:
        x: rows, ordered by expert, `[rows, in]`.
        ends: number of rows up to each expert's last one, `[experts] int32`.
        counts: rows of each expert.
        weights: a matrix of each expert, `[out, in]`.

    Returns:
        `[rows, out]`.
    """
    products: Tensor = _GroupedProduct.apply(x, ends, counts, *weights)  # type: ignore[no-untyped-call]
    return products


class _GroupedProduct(torch.autograd.Function):
    """Function of `grouped_product`, whose matrices are arguments of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        """Return the products."""
        ctx.save_for_backward(x, ends, *weights)
        ctx.empty = [expert for expert, rows in enumerate(counts) if not rows]
        return functional.grouped_mm(x, joined(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the rows and of the matrices that need one."""
        x, ends, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        needs_x, _, _, *needed = ctx.needs_input_grad
        of_x = functional.grouped_mm(gradient, joined(weights), offs=ends) if needs_x else None
        if not any(needed):
            return of_x, None, None, *(None for _ in weights)
        of_weights = functional.grouped_mm(gradient.T, x, offs=ends)
        for expert in ctx.empty:  # a kernel need not write a product over no rows
            of_weights[expert].zero_()
        return of_x, None, None, *(own if needs else None for own, needs in zip(of_weights, needed, strict=True))


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Return matrices as one tensor, `[experts, out, in]`: a view if they lie at equal distances, else a copy."""
    first, size, last = weights[0], weights[0].element_size(), len(weights) - 1
    places = [weight.data_ptr() - first.data_ptr() for weight in weights]
    step = places[-1] // last // size if last else first.numel()
    end = first.storage_offset() + step * last + first.numel()
    are_regular = places == [number * step * size for number in range(len(weights))]
    if are_regular and step >= first.numel() and end * size <= first.untyped_storage().nbytes():
        return first.as_strided((len(weights), *first.shape), (step, *first.stride()), first.storage_offset())
    return torch.stack(list(weights))
