"""Weights of a rank group: each rank loads its shards, and publishes the tensors that it owns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed

from relax_actors.engines.megatron.conversion import (
    EMBEDDING,
    OUTPUT,
    Conversion,
    merge_shards,
    shard_axis,
    shard_of,
)
from relax_actors.engines.megatron.mcore.shard_files import LocalShard
from relax_actors.engines.megatron.mcore.value_head import ValueHead
from relax_actors.engines.ranks.collectives import all_gather_messages
from relax_actors.engines.ranks.dealing import Entry, deal, nearest
from relax_actors.weights.encoder import Take
from relax_actors.weights.files import Fingerprint, TensorForm

_LOCAL_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


@dataclass(slots=True)
class _Part:
    """Shard of a parameter: its form, and the ranks that hold it."""

    form: TensorForm
    holders: list[int]


@dataclass(frozen=True, slots=True)
class _Place:
    """A Hugging Face tensor: number of its entry in `Conversion.entries`, and its form."""

    entry: int
    form: TensorForm


def local_shards(models: Sequence[Any]) -> dict[str, LocalShard]:
    """Parameters of this rank's model chunks by key."""
    tensor = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    expert = parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank()
    found: dict[str, LocalShard] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            key = key_of(model, name)
            shards, shard = expert if ".experts." in key else tensor
            split = shard_axis(key) is not None
            found[key] = LocalShard(parameter, shards, shard) if split else LocalShard(parameter, 1, 0)
    return found


def key_of(model: Any, name: str) -> str:
    """Key of a parameter of a model chunk: its name in the whole model; see `conversion`."""
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
    """Weights of this rank; implements `WeightSource`.

    Methods of `WeightSource` are collective: all ranks must call them in the same order.

    Args:
        local: parameters of this rank by key; see `local_shards`.
        conversion: between megatron-core and Hugging Face.

    Attributes:
        local: parameters of this rank by key.
        reading: held while weights are read, where they may leave the device.
    """

    def __init__(self, local: Mapping[str, LocalShard], conversion: Conversion) -> None:
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        self.prefixes = b""
        self.reading: AbstractContextManager[Any] = nullcontext()
        self.local, self._conversion = local, conversion
        self._entries = list(conversion.entries())
        forms = {key: TensorForm.of(local.parameter) for key, local in self.local.items()}
        held = {
            key: (local.shard, str(forms[key].dtype).removeprefix("torch."), forms[key].shape)
            for key, local in self.local.items()
        }
        self._parts: dict[str, dict[int, _Part]] = {}
        for rank, message in enumerate(all_gather_messages(held)):
            for key, (shard, dtype, shape) in message.items():
                form = TensorForm(getattr(torch, dtype), tuple(shape))
                self._parts.setdefault(key, {}).setdefault(shard, _Part(form, [])).holders.append(rank)
        self._device = next(iter(self.local.values())).parameter.device
        self._dealt: dict[int, list[int]] = {}

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Parameters of this rank by key."""
        return {key: local.parameter for key, local in self.local.items()}

    def shards(self, source: Mapping[str, Tensor], keys: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Shards of this rank from whole Hugging Face weights, one key at a time.

        Args:
            source: whole weights by Hugging Face name.
            keys: of the shards; all of this rank by default.

        Raises:
            ConfigError: `source` lacks a tensor, or a tensor has an unexpected shape.
        """
        for key in self.local if keys is None else keys:
            local = self.local[key]
            whole = self._conversion.from_hugging_face(key, source)
            yield key, shard_of(key, whole, local.shards, local.shard)

    @torch.no_grad()
    def load(self, source: Mapping[str, Tensor]) -> None:
        """Copy Hugging Face weights into this rank's parameters."""
        for key, shard in self.shards(source):
            self.local[key].parameter.copy_(shard)

    def whole(self) -> dict[str, Tensor]:
        """Return copies of all tensors by Hugging Face name in host memory, on rank 0; collective."""
        found: dict[str, Tensor] = {}

        def take(name: str, tensor: Tensor) -> None:
            found[name] = tensor.to("cpu", copy=True)

        self.visit(take, 1)
        return found

    @cached_property
    def _keys(self) -> dict[int, str]:
        return {id(local.parameter): key for key, local in self.local.items()}

    def key_of(self, parameter: Tensor) -> str:
        """Key of a parameter of this rank."""
        return self._keys[id(parameter)]

    def stored_key(self, key: str) -> str:
        """Key under which a checkpoint holds a parameter: the last pipeline stage has a copy of tied embeddings."""
        return EMBEDDING if key == OUTPUT and self._conversion.architecture.tied_embeddings else key

    def is_first_copy(self, key: str) -> bool:
        """Whether this is the one tensor-parallel rank that saves a parameter which all of them hold."""
        if self.stored_key(key) != key:
            return False
        if shard_axis(key) is not None:
            return True
        if ".experts." in key:  # tensor-parallel ranks have others
            return bool(parallel_state.get_expert_tensor_parallel_rank() == 0)
        return bool(parallel_state.get_tensor_model_parallel_rank() == 0)

    @cached_property
    def _keepers(self) -> dict[tuple[str, int], int]:
        """Rank that saves each shard which it holds in full, by key and number."""
        places = [(key, number) for keys in self._entries for key in keys for number, _ in self._parts_of(key)]
        parts = [self._parts[key][number] for key, number in places]
        return dict(
            zip(places, deal([Entry(prod(part.form.shape), part.holders) for part in parts], self.ranks), strict=True)
        )

    def keeps(self, key: str) -> bool:
        """Whether this rank saves its shard of a parameter, of those that hold it."""
        return self._keepers.get((key, self.local[key].shard)) == self.rank

    @cached_property
    def _places(self) -> dict[str, _Place]:
        """All Hugging Face tensors, ordered by name."""
        found = {}
        for number, keys in enumerate(self._entries):
            wholes = [
                merge_shards(
                    key,
                    [torch.empty(p.form.shape, dtype=p.form.dtype, device="meta") for _, p in self._parts_of(key)],
                )
                for key in keys
            ]
            for name, tensor in self._conversion.to_hugging_face(keys, wholes):
                found[name] = _Place(number, TensorForm.of(tensor))
        return dict(sorted(found.items()))

    def _parts_of(self, key: str) -> list[tuple[int, _Part]]:
        return sorted(self._parts[key].items())

    def _owners(self, writers: int) -> list[int]:
        """Rank that writes each entry."""
        if writers not in self._dealt:
            parts = [[part for key in keys for part in self._parts[key].values()] for keys in self._entries]
            sizes = [sum(prod(part.form.shape) for part in each) for each in parts]
            holders = [sorted({rank for part in each for rank in part.holders}) for each in parts]
            self._dealt[writers] = deal([Entry(*each) for each in zip(sizes, holders, strict=True)], writers)
        return self._dealt[writers]

    def forms(self, files: int) -> Mapping[str, TensorForm]:
        """Forms of the tensors that this rank owns; see `WeightSource`."""
        owners = self._owners(files)
        return {name: place.form for name, place in self._places.items() if owners[place.entry] == self.rank}

    def total(self, number: int) -> int:
        """Sum of a number over all ranks."""
        return sum(all_gather_messages(number))

    @torch.no_grad()
    def visit(self, take: Take, files: int) -> str:
        """Assemble each tensor on the rank that owns it, one after the other; see `WeightSource`.

        Rank 0 computes the fingerprint, whose bytes have one order: it gets each tensor too, and keeps none.
        """
        with self.reading:
            return self._visit(take, files)

    def _visit(self, take: Take, files: int) -> str:
        owners, found = self._owners(files), Fingerprint()
        failure: Exception | None = None
        open_entries: dict[int, dict[str, Tensor]] = {}
        for name, place in self._places.items():
            owner = owners[place.entry]
            if place.entry not in open_entries:
                open_entries[place.entry] = self._assemble(place.entry, owner)
            tensor = open_entries[place.entry].pop(name, None)
            if tensor is not None and self.rank == owner and failure is None:
                try:
                    take(name, tensor)
                except Exception as error:  # noqa: BLE001 raised below: the other ranks need this one until then
                    failure = error
            if not self._first_has(place.entry, owner):
                tensor = self._passed(tensor, place.form, owner, 0)
            if tensor is not None and self.rank == 0:
                found.add(name, tensor)
        self.prefixes = found.prefixes
        (digest, *_) = all_gather_messages(found.hexdigest())
        if failure is not None:
            raise failure
        return str(digest)

    def _first_has(self, entry: int, owner: int) -> bool:
        """Whether rank 0 has all of an entry without a message from its owner."""
        parts = (part for key in self._entries[entry] for part in self._parts[key].values())
        return owner == 0 or all(0 in part.holders for part in parts)

    def _assemble(self, entry: int, owner: int) -> dict[str, Tensor]:
        """Hugging Face tensors of an entry, on its owner and on rank 0 if that has all parts; else empty.

        A rank that holds a part which the owner lacks sends it.
        """
        is_here = self.rank == owner or (self.rank == 0 and self._first_has(entry, owner))
        wholes = []
        for key in self._entries[entry]:
            shards = []
            for _, part in self._parts_of(key):
                own = self.local[key].parameter.detach() if self.rank in part.holders else None
                found = self._passed(own, part.form, nearest(part.holders, owner), owner)
                if is_here and found is not None:
                    shards.append(found)
            if is_here:
                wholes.append(merge_shards(key, shards))
        return dict(self._conversion.to_hugging_face(self._entries[entry], wholes)) if is_here else {}

    def _passed(self, tensor: Tensor | None, form: TensorForm, sender: int, receiver: int) -> Tensor | None:
        """Send a tensor from one rank to another; return it where it is then."""
        if sender == receiver or self.rank not in (sender, receiver):
            return tensor
        if tensor is not None and self.rank == sender:
            distributed.send(tensor.contiguous(), receiver)
            return tensor
        received = torch.empty(form.shape, dtype=form.dtype, device=self._device)
        distributed.recv(received, sender)
        return received
