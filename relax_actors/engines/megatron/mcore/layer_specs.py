"""Layer specs with torch modules in place of TransformerEngine's; the same on CPU and CUDA."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import nn

from relax_actors.engines.megatron.mcore.attention import SdpaAttention


class RMSNorm(nn.RMSNorm):
    """RMSNorm of torch.

    With sequence parallelism megatron-core sums its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def block_spec(config: Any, stage: int | None) -> Any:
    """Spec of the layers of one virtual stage of this rank."""
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
    layers = get_num_layers_to_build(config, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)
