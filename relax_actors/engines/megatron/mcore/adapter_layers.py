"""Low-rank adapters beside linear layers of megatron-core, which stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional

from relax_actors.data.adapter import AdapterForm
from relax_actors.engines.megatron.adapter_parts import LayerParts
from relax_actors.engines.torch.lora_linear import POLICY, REFERENCE, LowRank, Switch, dropped

_MARKS = ("allreduce", "tensor_model_parallel", "partition_dim", "partition_stride")
"""Attributes of the weight of an expert's layer that megatron-core reads."""


class LayerAdapter:
    """Adapters of the parts of one linear layer, added to its outputs: W x + b + s B A drop(x).

    A layer that shares its outputs with other ranks (`ColumnParallelLinear`) has all of A and its rows of B; a layer
    that shares its inputs (`RowParallelLinear`) has its columns of A and all of B. Ranks exchange only the `rank`
    numbers of a token between A and B. With sequence parallelism the matrix that sees a part of the sequence gets its
    gradient summed over the ranks by megatron-core, as norms do. Layers of experts are whole on their rank.

    Args:
        layer: the layer of megatron-core, which gets a module `adapter`.
        parts: its parts.
        form: form of the adapter.
        switch: whether adapters compute, and how inputs are dropped.
    """

    def __init__(self, layer: Any, parts: LayerParts, form: AdapterForm, switch: Switch) -> None:
        self.layer, self._parts, self._form, self._switch = layer, parts, form, switch
        self._splits_inputs = isinstance(layer, RowParallelLinear)
        # Ranks share no layer of an expert: the check refuses such layouts.
        self._shards = 1 if parts.experts else parallel_state.get_tensor_model_parallel_world_size()
        own = {name: self._made(outputs) for name, outputs in parts.parts if name in parts.targets}
        self._slots = {POLICY: own}
        layer.adapter = nn.ModuleDict({name.rpartition(".")[2]: matrices for name, matrices in own.items()})
        layer.register_forward_hook(self._add, prepend=True)  # before outputs of all ranks are gathered

    def _made(self, outputs: int) -> LowRank:
        """Return A and B of a part on this rank, with the marks that megatron-core reads."""
        weight, inputs = self.layer.weight, self._parts.inputs
        rows, columns = (1, self._shards) if self._splits_inputs else (self._shards, 1)
        matrices = LowRank(self._form.rank, inputs // columns, outputs // rows, weight.device).to(weight.dtype)
        split, whole = (matrices.down, matrices.up) if self._splits_inputs else (matrices.up, matrices.down)
        if self._shards > 1:
            marks = {"tensor_model_parallel": True, "partition_dim": int(self._splits_inputs), "partition_stride": 1}
            for name, value in marks.items():
                setattr(split, name, value)
        by_sequence = self.layer.sequence_parallel and not self._parts.experts
        whole.sequence_parallel = by_sequence  # type: ignore[attr-defined]
        for matrix in (split, whole) if self._parts.experts else ():
            for name in _MARKS:  # whose gradients are summed, and counted in the norm, as those of the expert are
                if hasattr(weight, name):
                    setattr(matrix, name, getattr(weight, name))
        return matrices

    @torch.no_grad()
    def keep_first(self) -> None:
        """Copy A and B to the slot of the reference, which no optimizer and no version knows."""
        self._slots[REFERENCE] = deepcopy(self._slots[POLICY])
        for matrices in self._slots[REFERENCE].values():
            matrices.requires_grad_(requires_grad=False)

    def first(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each trained matrix with that of the reference."""
        for name, matrices in self._slots[POLICY].items():
            yield from zip(matrices.parameters(), self._slots[REFERENCE][name].parameters(), strict=True)

    def _add(self, _: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
        """Add the adapters to the output of the layer; a forward hook."""
        if self._switch.slot is None:
            return None
        slot = self._slots[self._switch.slot]
        computed = {name: self._computed(name, matrices, inputs[0]) for name, matrices in slot.items()}
        return output[0] + self._joined(computed, output[0]) * self._form.scale, output[1]

    def _computed(self, name: str, matrices: LowRank, x: Tensor) -> Tensor:
        """Return B A drop(x) of a part, `[seq, rows, out]`."""
        by_sequence = self.layer.sequence_parallel
        # Ranks that have the same inputs drop the same ones.
        rank = parallel_state.get_tensor_model_parallel_rank() if self._splits_inputs or by_sequence else 0
        x = dropped(x, share=self._form.dropout, seed=self._switch.seed, name=f"{name}|{rank}")
        low = functional.linear(x, matrices.down)
        if self._parts.experts:
            return functional.linear(low, matrices.up)
        if self._splits_inputs:
            exchange: Callable[[Tensor], Tensor] = (
                reduce_scatter_to_sequence_parallel_region if by_sequence else reduce_from_tensor_model_parallel_region
            )
        else:
            exchange = gather_from_sequence_parallel_region if by_sequence else copy_to_tensor_model_parallel_region
        return functional.linear(exchange(low), matrices.up)

    def _joined(self, given: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Join numbers of the parts along the last axis, with the other axes of `like`; 0 for missing parts."""
        shards = 1 if self._splits_inputs else self._shards
        numbers = [
            given[name] if name in given else like.new_zeros(*like.shape[:-1], outputs // shards)
            for name, outputs in self._parts.parts
        ]
        return numbers[0] if len(numbers) == 1 else self._parts.joined(numbers, shards)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return this rank's shard of W + s B A, in the dtype of W; computed in float32."""
        weight, slot = self.layer.weight, self._slots[POLICY]
        added = {name: (matrices.up.float() @ matrices.down.float()).T for name, matrices in slot.items()}
        joined = self._joined(added, weight.T.float()).T
        merged: Tensor = (weight.float() + self._form.scale * joined).to(weight.dtype)
        return merged
