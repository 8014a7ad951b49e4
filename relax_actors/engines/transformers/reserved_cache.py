"""Key-value cache whose layers reserve room for tokens to come.

A cache that grows by concatenation copies itself with every token, and leaves blocks of ever new sizes to the
allocator.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

MIN_RESERVE = 64
"""Least number of tokens for which a layer reserves room; a longer sequence reserves a quarter of its length."""


class ReservedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values `[batch, heads, tokens, head_dim]`, as views of tensors with room for further tokens.

    Args:
        limit: number of tokens expected at most.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit = limit
        # Tensors of which `keys` and `values` are the beginning; None if there is no room.
        self._rooms: list[Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of tokens; return those of all tokens."""
        used = self.get_seq_length()
        if not used:
            states: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return states
        length = used + key_states.shape[-2]
        if self._rooms is None or self._rooms[0].shape[-2] < length:
            reserved = max(length, min(self._limit, length + max(MIN_RESERVE, length // 4)))
            self._rooms = [_with_room(tensor, reserved) for tensor in (self.keys, self.values) if tensor is not None]
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[..., used:length, :] = new
        self.keys, self.values = (room[..., :length, :] for room in self._rooms)
        return self.keys, self.values

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Hold other keys and values, of sequences whose length is not known in advance."""
        self.keys, self.values, self._rooms, self._limit = keys, values, None, sys.maxsize

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self._rooms = None
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences at `indices`."""
        self._rooms = None
        super().batch_select_indices(indices)


class RecurrentLayer(LinearAttentionLayer):
    """State of a recurrent layer, with what the cache of a batch does; transformers has it for beams only."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        states = (*self.conv_states.values(), *self.recurrent_states.values())
        sequences = next(len(state) for state in states if state is not None)
        self.batch_select_indices(torch.arange(sequences).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences at `indices`."""
        self.reorder_cache(indices)  # type: ignore[arg-type]


def reserved_cache(config: PreTrainedConfig, limit: int) -> DynamicCache:
    """Return an empty cache for up to `limit` tokens; layers that are bounded by a window are those of transformers."""
    cache = DynamicCache(config=config)
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[number] = ReservedLayer(limit)
        elif type(layer) is LinearAttentionLayer:
            cache.layers[number] = RecurrentLayer(layer.number_of_states)
    return cache


def _with_room(tensor: Tensor, tokens: int) -> Tensor:
    """Copy keys or values into a tensor with room for `tokens`."""
    *batch, used, width = tensor.shape
    room = tensor.new_empty(*batch, tokens, width)
    room[..., :used, :] = tensor
    return room
