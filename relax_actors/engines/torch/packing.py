"""Sequence packing: sequences are concatenated, so only attention computes on padding.

Linear layers get `[1, total]` tokens. Attention unpacks them to `[sequences, longest]`, padded on the right, where a
causal mask suffices. Works for models that use the `AttentionInterface` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "sdpa_packed"
"""Attention name for `PreTrainedModel.set_attn_implementation`; the model is then called with `packing=`."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of concatenated sequences.

    Attributes:
        places: `[total] int64`, index of each token in the padded layout `[sequences * longest]`.
        positions: `[1, total] int64`, position of each token in its sequence.
        ends: `[sequences + 1] int32`, cumulative lengths, starting with 0.
        sequences: number of sequences.
        longest: length of the longest sequence.
    """

    places: Tensor
    positions: Tensor
    ends: Tensor
    sequences: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packing:
        """Build the packing of sequences with these lengths."""
        longest = max(lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        places = positions + np.repeat(np.arange(len(lengths)) * longest, lengths)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        on = [torch.from_numpy(array).to(device) for array in (places, positions, ends)]
        return cls(on[0], on[1][None], on[2], len(lengths), longest)

    def unpack(self, packed: Tensor) -> Tensor:
        """Unpack `[1, heads, total, dim]` to `[sequences, heads, longest, dim]`, padded with zeros."""
        padded = tokens = packed[0].transpose(0, 1)
        if not self._is_dense:
            zeros = tokens.new_zeros(self.sequences * self.longest, *tokens.shape[1:])
            padded = zeros.index_copy(0, self.places, tokens)
        return padded.view(self.sequences, self.longest, *tokens.shape[1:]).transpose(1, 2)

    def pack(self, padded: Tensor) -> Tensor:
        """Pack `[sequences, longest, heads, dim]` to `[1, total, heads, dim]`."""
        tokens = padded.reshape(self.sequences * self.longest, *padded.shape[2:])
        return (tokens if self._is_dense else tokens.index_select(0, self.places))[None]

    @property
    def _is_dense(self) -> bool:
        return len(self.places) == self.sequences * self.longest


def packed_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each packed sequence; arguments as transformers' attention functions."""
    del attention_mask
    mask = None
    if sliding_window is not None and sliding_window < packing.longest:
        positions = torch.arange(packing.longest, device=query.device)
        distance = positions[:, None] - positions
        mask = ((distance >= 0) & (distance < sliding_window))[None, None]
    unpacked = packing.unpack(query), packing.unpack(key), packing.unpack(value)
    output, _ = sdpa_attention_forward(module, *unpacked, mask, **settings)
    return packing.pack(output), None


def _no_mask(**_: Any) -> None:
    """Build no mask; `packed_attention_forward` makes its own."""


AttentionInterface.register(ATTENTION, packed_attention_forward)
AttentionMaskInterface.register(ATTENTION, _no_mask)
