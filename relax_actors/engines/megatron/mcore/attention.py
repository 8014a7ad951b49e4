"""Attention by torch, for packed sequences and context parallelism: megatron-core has these with TransformerEngine.

Its own local attention holds `[heads, seq, seq]` and is twice as slow on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from relax_actors.engines.torch.packing import Packing

_FLASH = (torch.float16, torch.bfloat16)


class Packed(PackedSeqParams):  # type: ignore[misc]
    """Where packed sequences lie, handed through megatron-core to attention and to the rotary positions.

    To megatron-core it is one sequence: `qkv_format` stays unset, or it would turn the positions of each by itself.
    """

    def __init__(self, packing: Packing) -> None:
        super().__init__()
        self.packing = packing


class Rotary(RotaryEmbedding):  # type: ignore[misc]
    """Rotary positions that begin anew with each packed sequence."""

    def get_rotary_seq_len(
        self, context: Any, transformer: Any, given: Any, config: Any, packed: Packed | None = None, **_: Any
    ) -> Any:
        """What `forward` makes angles of: the packed sequences, or the length of rows."""
        return packed or super().get_rotary_seq_len(context, transformer, given, config)

    def forward(self, length: Any, **settings: Any) -> Any:
        """Angles `[seq, 1, 1, width] float32`."""
        if not isinstance(length, Packed):
            return super().forward(length, **settings)
        packing = length.packing
        return self.get_emb(packing.longest)[packing.positions[0]]


class SdpaAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention within each sequence.

    Sequences are packed (`packed_seq_params` is a `Packed`), or padded on the right, so that no mask is needed. With
    context parallelism a rank has chunks r and 2n-1-r of each, and takes the keys and values of all.
    """

    def __init__(
        self,
        config: Any,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: Any,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self._group = pg_collection.cp
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: Packed | None = None,
        **__: Any,
    ) -> Tensor:
        """`query [seq, batch, heads, width]`, keys and values with their own number of heads; `[seq, batch, -1]`."""
        if packed_seq_params is not None:
            packing = packed_seq_params.packing
            attend = self._by_lengths if query.is_cuda and query.dtype in _FLASH else self._spread_out
            return attend(query, key, value, packing).flatten(1)[:, None]
        ranks, mask = self._group.size(), None
        if ranks > 1:
            key, value = self._whole(key), self._whole(value)
            here = chunk_positions(key.shape[0], ranks, self._group.rank(), query.device)
            mask = here[:, None] >= torch.arange(key.shape[0], device=query.device)[None]
        attended = self._attend(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), mask)
        return attended.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Of `[batch, heads, seq, width]`; causal if there is no mask."""
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _spread_out(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """Packed sequences, laid out as rows that are padded on the right: `[total, heads, width]`."""
        spread = [packing.spread(one.permute(1, 2, 0, 3)) for one in (query, key, value)]
        return packing.gather(self._attend(spread[0], spread[1], spread[2]).transpose(1, 2))[0]

    def _by_lengths(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """Packed sequences as they are, by a kernel of CUDA's for half precision; not yet run on a GPU."""
        ends, longest = packing.ends, packing.longest
        found = varlen_attn(
            query[:, 0],
            key[:, 0],
            value[:, 0],
            ends,
            ends,
            longest,
            longest,
            scale=self._scale,
            window_size=(-1, 0),
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return found if isinstance(found, Tensor) else found[0]

    def _whole(self, tensor: Tensor) -> Tensor:
        """All ranks' chunks in the order of the sequence; its gradient is added up over the ranks."""
        ranks = self._group.size()
        chunks = gather_from_sequence_parallel_region(tensor.contiguous(), group=self._group).chunk(2 * ranks)
        return torch.cat([*chunks[0::2], *reversed(chunks[1::2])])


def chunk_positions(length: int, ranks: int, rank: int, device: torch.device) -> Tensor:
    """Positions of a sequence that a rank of context parallelism has: chunks `rank` and `2 ranks - 1 - rank`."""
    width = length // (2 * ranks)
    one = torch.arange(width, device=device)
    return torch.cat([rank * width + one, (2 * ranks - 1 - rank) * width + one])
