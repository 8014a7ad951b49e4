"""Sequences laid end to end: a model computes on no padding but in its attention.

Linear layers see `[1, total]` tokens; attention alone lays them out as `[sequences, longest]`, padded on the right,
where a causal mask is all that is needed. For models whose attention goes through transformers' `AttentionInterface`.
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
"""Name of the attention for `PreTrainedModel.set_attn_implementation`; the model is then called with `packing=`."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the tokens of sequences lie that were laid end to end.

    `places [total] int64`: index of each token in `[sequences * longest]`; `positions [1, total] int64`: its own in it;
    `ends [sequences + 1] int32`: 0 and where each sequence ends.
    """

    places: Tensor
    positions: Tensor
    ends: Tensor
    sequences: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packing:
        """The packing of sequences of such lengths."""
        longest = max(lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        places = positions + np.repeat(np.arange(len(lengths)) * longest, lengths)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        on = [torch.from_numpy(array).to(device) for array in (places, positions, ends)]
        return cls(on[0], on[1][None], on[2], len(lengths), longest)

    def spread(self, packed: Tensor) -> Tensor:
        """`[1, heads, total, dim]` as `[sequences, heads, longest, dim]`, zeros in between."""
        padded = tokens = packed[0].transpose(0, 1)
        if not self._is_dense:
            room = tokens.new_zeros(self.sequences * self.longest, *tokens.shape[1:])
            padded = room.index_copy(0, self.places, tokens)
        return padded.view(self.sequences, self.longest, *tokens.shape[1:]).transpose(1, 2)

    def gather(self, padded: Tensor) -> Tensor:
        """`[sequences, longest, heads, dim]` as `[1, total, heads, dim]`."""
        tokens = padded.reshape(self.sequences * self.longest, *padded.shape[2:])
        return (tokens if self._is_dense else tokens.index_select(0, self.places))[None]

    @property
    def _is_dense(self) -> bool:
        return len(self.places) == self.sequences * self.longest


def attend(
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
    """Causal attention within each packed sequence; arguments are those of transformers' attention functions."""
    del attention_mask
    mask = None
    if sliding_window is not None and sliding_window < packing.longest:
        at = torch.arange(packing.longest, device=query.device)
        behind = at[:, None] - at
        mask = ((behind >= 0) & (behind < sliding_window))[None, None]
    spread = packing.spread(query), packing.spread(key), packing.spread(value)
    output, _ = sdpa_attention_forward(module, *spread, mask, **settings)
    return packing.gather(output), None


def _no_mask(**_: Any) -> None:
    """Attention makes its own."""


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, _no_mask)
