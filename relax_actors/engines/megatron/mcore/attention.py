"""Attention with torch's SDPA, for packed sequences and context parallelism.

megatron-core supports both with TransformerEngine only. Its local attention materialises `[heads, seq, seq]` and is
twice as slow on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from relax_actors.engines.megatron.mcore.batch_media import MicroBatchMedia
from relax_actors.engines.megatron.mcore.shared_towers import Ahead
from relax_actors.engines.torch.packing import Packing, attend_rows


class BatchParams(PackedSeqParams):  # type: ignore[misc]
    """Layout and media of a micro-batch, passed through megatron-core to attention and rotary embeddings.

    `qkv_format` stays unset: otherwise megatron-core would apply the rotary embedding to each sequence itself.

    Args:
        packing: layout of packed sequences; None if they are padded on the right.
        media: positions and media of a multimodal model.
        ahead: media that were encoded before the micro-batch.

    Attributes:
        deepstack: `[seq, 1, hidden]` to add to the output of each of the first layers; see `MediaModel`.
    """

    def __init__(
        self, packing: Packing | None, media: MicroBatchMedia | None = None, ahead: Ahead | None = None
    ) -> None:
        super().__init__()
        self.packing, self.media, self.ahead = packing, media, ahead
        self.deepstack: tuple[Tensor, ...] = ()


class SdpaAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention within each sequence, in some layers within a window of it.

    Sequences are packed (`packed_seq_params` has a packing), or padded on the right, which needs no mask. With
    context parallelism rank r of n has chunks r and 2n-1-r of each sequence, and gathers keys and values of all ranks.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: Any,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self._group = pg_collection.cp
        self._scale = softmax_scale
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] + 1 if slides else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: BatchParams | None = None,
        **__: Any,
    ) -> Tensor:
        """Attention output, `[seq, batch, heads * head_dim]`.

        Args:
            query: `[seq, batch, heads, head_dim]`; latent attention leaves out `batch` where it is 1.
            key: the same, with the number of query groups for heads.
            value: as `key`.
            packed_seq_params: layout of the micro-batch; if it is packed, `batch` is 1.
        """
        packing = None if packed_seq_params is None else packed_seq_params.packing
        if packing is not None:
            tensors = (query, key, value)
            packed = tensors if query.dim() == 3 else [tensor[:, 0] for tensor in tensors]  # noqa: PLR2004 dimensions
            return packing.attend(*packed, scale=self._scale, window=self._window).flatten(1)[:, None]
        ranks = self._group.size()
        if ranks > 1:
            key, value = self._gather_sequence(key), self._gather_sequence(value)
            positions = chunk_positions(key.shape[0], ranks, self._group.rank(), query.device)
        else:
            positions = torch.arange(query.shape[0], device=query.device)
        mask = None
        if ranks > 1 or self._window is not None:
            distance = positions[:, None] - torch.arange(key.shape[0], device=query.device)[None]
            mask = (distance >= 0) & (distance < (self._window or key.shape[0]))
        rows = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        return attend_rows(rows[0], rows[1], rows[2], mask, self._scale).transpose(0, 1).flatten(2)

    def _gather_sequence(self, tensor: Tensor) -> Tensor:
        """Chunks of all ranks in sequence order; gradients are summed over the ranks."""
        ranks = self._group.size()
        chunks = gather_from_sequence_parallel_region(tensor.contiguous(), group=self._group).chunk(2 * ranks)
        return torch.cat([*chunks[0::2], *reversed(chunks[1::2])])


def chunk_positions(length: int, ranks: int, rank: int, device: torch.device) -> Tensor:
    """Positions of a sequence that a context-parallel rank holds.

    They are chunks `rank` and `2 * ranks - 1 - rank`. The pairing of an early with a late chunk (zig-zag) gives all
    ranks the same amount of causal attention.
    """
    width = length // (2 * ranks)
    offsets = torch.arange(width, device=device)
    return torch.cat([rank * width + offsets, (2 * ranks - 1 - rank) * width + offsets])
