"""Layers that megatron-core lacks without TransformerEngine: attention by torch's SDPA, norms in sequence parallel.

The same code on CPU and CUDA. Stock local attention holds `[heads, seq, seq]`, is twice as slow on a CPU, and knows
neither context parallelism nor packed sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.RMSNorm):
    """torch's, whose gradient is added up over the tensor ranks where they share the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class SdpaAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention over sequences padded on the right, so that no mask is needed.

    With context parallelism a rank has chunks r and 2n-1-r of the sequence, and takes the keys and values of all.
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
        **__: Any,
    ) -> Tensor:
        """`query [seq, batch, heads, width]`, keys and values with their own number of heads; `[seq, batch, -1]`."""
        ranks, mask = self._group.size(), None
        if ranks > 1:
            key, value = self._whole(key), self._whole(value)
            here = chunk_positions(key.shape[0], ranks, self._group.rank(), query.device)
            mask = here[:, None] >= torch.arange(key.shape[0], device=query.device)[None]
        attended = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return attended.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

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


def block_spec(config: Any, stage: int | None) -> Any:
    """megatron-core's own layers with ours in their places, for a virtual stage of this rank."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    attention = layer.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = SdpaAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    here = get_num_layers_to_build(config, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * here, layer_norm=RMSNorm)
