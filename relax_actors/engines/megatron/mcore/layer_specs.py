"""Layer specs with torch modules in place of TransformerEngine's; the same on CPU and CUDA."""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from relax_actors.engines.megatron.mcore import ON_CPU
from relax_actors.engines.megatron.mcore.attention import SdpaAttention
from relax_actors.engines.megatron.mcore.grouped_experts import GroupedExperts
from relax_actors.engines.megatron.mcore.process_groups import device
from relax_actors.engines.torch.lora_experts import has_grouped_kernel


class RMSNorm(nn.RMSNorm):
    """RMSNorm of torch.

    With sequence parallelism megatron-core sums its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Latent attention (DeepSeek-V3) whose tensor-parallel ranks sum the gradients of the keys that all heads share.

    In megatron-core each rank has the gradient of its own heads for the rotary part of the keys.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            self.linear_kv_down_proj.register_forward_hook(self._gather)

    def _gather(self, _: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Gather the outputs of all ranks, so that megatron-core finds them whole."""
        whole: Tensor = gather_from_tensor_model_parallel_region(output[0])
        if self.config.sequence_parallel:  # megatron-core gathers the keys again, and then sums their gradients
            return scatter_to_sequence_parallel_region(whole), output[1]
        sizes = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        latent, keys = whole.split(sizes, -1)  # type: ignore[no-untyped-call]
        return torch.cat([latent, copy_to_tensor_model_parallel_region(keys)], -1), output[1]


def block_spec(config: Any, stage: int | None, *, grouped_experts: bool | Literal["auto"]) -> Any:
    """Spec of the layers of one virtual stage of this rank; for `grouped_experts` see `MegatronSection`."""
    first, count = get_transformer_layer_offset(config, vp_stage=stage), get_num_layers_to_build(config, vp_stage=stage)
    frequency = config.moe_layer_freq  # of a model with experts, a list of 1 for each layer that has them, else 0
    has_experts = frequency if config.num_moe_experts else [0] * config.num_layers
    by_kind = {kind: _layer_spec(config, config.num_moe_experts if kind else None) for kind in sorted(set(has_experts))}
    if 1 in by_kind and _groups_experts(config, grouped_experts):
        by_kind[1].submodules.mlp.submodules.experts.module = GroupedExperts
    layers = [by_kind[has_experts[layer]] for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _groups_experts(config: Any, setting: bool | Literal["auto"]) -> bool:  # noqa: FBT001 a setting
    if setting != "auto":
        return setting
    width = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
    return not ON_CPU and has_grouped_kernel(device(), config.params_dtype, (config.hidden_size, width))


def _layer_spec(config: Any, experts: int | None) -> Any:
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    attention = layer.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = SdpaAttention
    if config.multi_latent_attention:
        layer.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
