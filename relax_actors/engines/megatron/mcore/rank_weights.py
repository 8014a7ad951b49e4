"""Weights of a rank group: each rank loads its shards, rank 0 gathers all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed

from relax_actors.engines.megatron.conversion import Conversion, merge_shards, shard_axis, shard_of
from relax_actors.engines.megatron.mcore.value_head import ValueHead
from relax_actors.engines.ranks.collectives import all_gather_messages

_LOCAL_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Parameter of this rank: shard number `shard` of `shards`."""

    parameter: Tensor
    shards: int
    shard: int


@dataclass(frozen=True, slots=True)
class ShardOwner:
    """Rank that sends a shard, and the shard's shape."""

    rank: int
    shape: tuple[int, ...]


def local_shards(models: Sequence[Any]) -> dict[str, LocalShard]:
    """Parameters of this rank's model chunks by key."""
    tensor = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    expert = parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank()
    found: dict[str, LocalShard] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            key = _key(model, name)
            shards, shard = expert if ".experts." in key else tensor
            split = shard_axis(key) is not None
            found[key] = LocalShard(parameter, shards, shard) if split else LocalShard(parameter, 1, 0)
    return found


def _key(model: Any, name: str) -> str:
    """Name of a parameter in the whole model; see `conversion`."""
    match = _LOCAL_LAYER.fullmatch(name)
    if match is None:
        is_head = name.startswith("output_layer.") and isinstance(model.output_layer, ValueHead)
        return name.replace("output_layer", "value_head") if is_head else name.removeprefix("decoder.")
    layer, local = model.decoder.layers[int(match[1])], match[2]
    if expert := _LOCAL_EXPERT.fullmatch(local):
        first = parallel_state.get_expert_model_parallel_rank() * layer.mlp.num_local_experts
        local = f"mlp.experts.{first + int(expert[1])}.{expert[2]}"
    return f"layers.{layer.layer_number - 1}.{local}"


class RankWeights:
    """Weights of this rank. Methods are collective: all ranks must call them in the same order.

    Args:
        models: model chunks of this rank.
        conversion: between megatron-core and Hugging Face.
    """

    def __init__(self, models: Sequence[Any], conversion: Conversion) -> None:
        self._shards, self._conversion = local_shards(models), conversion
        held = {key: (local.shard, tuple(local.parameter.shape)) for key, local in self._shards.items()}
        # Replicated shards are sent by the lowest rank that holds them.
        self._owners: dict[str, dict[int, ShardOwner]] = {}
        for rank, message in enumerate(all_gather_messages(held)):
            for key, (shard, shape) in message.items():
                self._owners.setdefault(key, {}).setdefault(shard, ShardOwner(rank, tuple(shape)))

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Parameters of this rank by key."""
        return {key: local.parameter for key, local in self._shards.items()}

    def shards(self, source: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Shards of this rank from whole Hugging Face weights, one key at a time.

        Raises:
            ConfigError: `source` lacks a tensor, or a tensor has an unexpected shape.
        """
        for key, local in self._shards.items():
            whole = self._conversion.from_hugging_face(key, source)
            yield key, shard_of(key, whole, local.shards, local.shard)

    @torch.no_grad()
    def load(self, source: Mapping[str, Tensor]) -> None:
        """Copy Hugging Face weights into this rank's parameters."""
        for key, shard in self.shards(source):
            self._shards[key].parameter.copy_(shard)

    @torch.no_grad()
    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Copies of all weights by Hugging Face name, on rank 0; nothing on other ranks."""
        for keys in self._conversion.entries():
            wholes = [self._gather_key(key) for key in keys]
            if distributed.get_rank() == 0:
                merged = [whole for whole in wholes if whole is not None]
                for name, tensor in self._conversion.to_hugging_face(keys, merged):
                    yield name, tensor.clone(memory_format=torch.contiguous_format)

    def _gather_key(self, key: str) -> Tensor | None:
        """Whole parameter on rank 0; other ranks send the shards that they own and return None."""
        rank, owners = distributed.get_rank(), self._owners[key]
        if rank != 0:
            for owner in owners.values():
                if owner.rank == rank:
                    distributed.send(self._shards[key].parameter.detach().contiguous(), 0)
            return None
        shards = []
        for number in sorted(owners):
            owner = owners[number]
            if owner.rank == 0:
                shards.append(self._shards[key].parameter.detach())
            else:
                like = next(iter(self._shards.values())).parameter
                tensor = torch.empty(owner.shape, dtype=like.dtype, device=like.device)
                distributed.recv(tensor, owner.rank)
                shards.append(tensor)
        return merge_shards(key, shards)
