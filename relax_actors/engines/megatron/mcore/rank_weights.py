"""The weights of a rank group in Hugging Face names: each rank takes its pieces, rank 0 receives all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed

from relax_actors.engines.megatron.conversion import Conversion, axis_of, joined, piece_of
from relax_actors.engines.megatron.mcore.process import told_by_all

_LOCAL_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter of this rank: piece number `piece` of `pieces`."""

    parameter: Tensor
    pieces: int
    piece: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece that some rank has."""

    rank: int
    shape: tuple[int, ...]


def places_of(models: Sequence[Any]) -> dict[str, Place]:
    """The parameters of this rank's stages by their keys."""
    tensor = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    expert = parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank()
    found: dict[str, Place] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            key = _key(model, name)
            pieces, piece = expert if ".experts." in key else tensor
            found[key] = Place(parameter, pieces, piece) if axis_of(key) is not None else Place(parameter, 1, 0)
    return found


def _key(model: Any, name: str) -> str:
    """The name of a parameter in the whole model."""
    match = _LOCAL_LAYER.fullmatch(name)
    if match is None:
        return name.removeprefix("decoder.")
    layer, part = model.decoder.layers[int(match[1])], match[2]
    if expert := _LOCAL_EXPERT.fullmatch(part):
        first = parallel_state.get_expert_model_parallel_rank() * layer.mlp.num_local_experts
        part = f"mlp.experts.{first + int(expert[1])}.{expert[2]}"
    return f"layers.{layer.layer_number - 1}.{part}"


class RankWeights:
    """This rank's part of the weights. All ranks call the same methods in the same order.

    Args:
        models: the stages of this rank.
        conversion: between the two forms.
    """

    def __init__(self, models: Sequence[Any], conversion: Conversion) -> None:
        self._places, self._conversion = places_of(models), conversion
        here = {key: (place.piece, tuple(place.parameter.shape)) for key, place in self._places.items()}
        # The lowest rank that has a piece stands for those that have it too.
        self._pieces: dict[str, dict[int, Piece]] = {}
        for rank, held in enumerate(told_by_all(here)):
            for key, (piece, shape) in held.items():
                self._pieces.setdefault(key, {}).setdefault(piece, Piece(rank, tuple(shape)))

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """This rank's parameters by their keys."""
        return {key: place.parameter for key, place in self._places.items()}

    def pieces(self, source: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """What this rank's parameters hold by Hugging Face weights, one after the other.

        Raises:
            ConfigError: the source lacks a tensor, or has it in another shape.
        """
        for key, place in self._places.items():
            whole = self._conversion.from_hugging_face(key, source)
            yield key, piece_of(key, whole, place.pieces, place.piece)

    @torch.no_grad()
    def take(self, source: Mapping[str, Tensor]) -> None:
        """Fill this rank's parameters from Hugging Face weights."""
        for key, piece in self.pieces(source):
            self._places[key].parameter.copy_(piece)

    @torch.no_grad()
    def give(self) -> Iterator[tuple[str, Tensor]]:
        """All weights by their Hugging Face names, copies on the device: on rank 0; nothing on the others."""
        for keys in self._conversion.entries():
            wholes = [self._whole(key) for key in keys]
            if distributed.get_rank() == 0:
                found = [whole for whole in wholes if whole is not None]
                for name, tensor in self._conversion.to_hugging_face(keys, found):
                    yield name, tensor.clone(memory_format=torch.contiguous_format)

    def _whole(self, key: str) -> Tensor | None:
        """A parameter on rank 0, and None on the others, which send what they have of it."""
        rank, pieces = distributed.get_rank(), self._pieces[key]
        if rank != 0:
            for piece in pieces.values():
                if piece.rank == rank:
                    distributed.send(self._places[key].parameter.detach().contiguous(), 0)
            return None
        found = []
        for number in sorted(pieces):
            piece = pieces[number]
            if piece.rank == 0:
                found.append(self._places[key].parameter.detach())
            else:
                like = next(iter(self._places.values())).parameter
                tensor = torch.empty(piece.shape, dtype=like.dtype, device=like.device)
                distributed.recv(tensor, piece.rank)
                found.append(tensor)
        return joined(key, found)
