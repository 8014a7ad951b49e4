"""Tiny models of the text families: `model.architecture` by family, and variants of their attention and positions."""

from __future__ import annotations

from typing import Any

import torch

from relax_actors.config import Config
from relax_actors.data.model_folder import experts_of
from relax_actors.engines.torch.model import build, tensors_of

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED: dict[str, Any] = {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} | SHARED
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
LATENT |= {"head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}


def of(model_type: str, **fields: Any) -> dict[str, Any]:
    """Return `model.architecture` of a tiny model."""
    return SHAPE | {"model_type": model_type} | fields


MEGATRON: dict[str, dict[str, Any]] = {
    "llama": of("llama"),
    "llama tied": of("llama", tie_word_embeddings=True),
    "llama llama3": of("llama", rope_parameters=LLAMA3),
    "qwen2": of("qwen2"),
    "qwen2 windows": of("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen2_moe": of("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=48, norm_topk_prob=False),
    "qwen3": of("qwen3"),
    "qwen3 yarn": of("qwen3", rope_parameters=YARN),
    "qwen3_moe": of("qwen3_moe", **EXPERTS, norm_topk_prob=True),
    "qwen3_moe dense": of("qwen3_moe", **EXPERTS, norm_topk_prob=True, mlp_only_layers=[0]),
    "mistral": of("mistral", sliding_window=4),
    "mixtral": of("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": of("glm4_moe", **ROUTED, attention_bias=True, use_qk_norm=True, n_group=1, topk_group=1),
    "deepseek_v3": of("deepseek_v3", **ROUTED, **LATENT, n_group=2, topk_group=1),
    "deepseek_v3 yarn": of(
        "deepseek_v3",
        **ROUTED,
        **LATENT | {"q_lora_rank": None},
        n_group=1,
        topk_group=1,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
}
"""Models that megatron-core trains."""
TORCH: dict[str, dict[str, Any]] = {
    "gemma3": of("gemma3_text", sliding_window=4),
    "glm4": of("glm4"),
    "gpt_oss": of("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=4, rope_parameters=YARN),
    "qwen3_next": of("qwen3_next", **EXPERTS, **RECURRENT, shared_expert_intermediate_size=32),
    "qwen3_5": of("qwen3_5_text", **RECURRENT),
    "qwen3_5_moe": of("qwen3_5_moe_text", **EXPERTS, **RECURRENT, shared_expert_intermediate_size=32),
}
"""Models that only the torch engine trains."""
SGLANG: dict[str, dict[str, Any]] = {
    "llama": MEGATRON["llama llama3"],
    "qwen2": MEGATRON["qwen2"]
    | {"head_dim": 8},  # SGLang divides the hidden size by the heads, whatever config.json says
    "qwen3": MEGATRON["qwen3"],
    "mistral": of("mistral", sliding_window=None),
    "glm4": TORCH["glm4"],
    "gemma3": TORCH["gemma3"] | {"tie_word_embeddings": True, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2_moe": MEGATRON["qwen2_moe"] | {"head_dim": 8},
    "qwen3_moe": MEGATRON["qwen3_moe"],
    "mixtral": MEGATRON["mixtral"] | {"head_dim": 8},
    "glm4_moe": MEGATRON["glm4_moe"],
    "gpt_oss": TORCH["gpt_oss"],
}
"""Models that SGLang serves with the log-probs of transformers."""


@torch.no_grad()
def save_random(config: Config) -> Any:
    """Write random weights to a model folder as transformers does, and return the model; no bias is 0, no norm 1."""
    model = build(config.model_path, seed=7)
    source = torch.Generator().manual_seed(7)
    for tensor in tensors_of(model).values():
        tensor.add_(torch.randn(tensor.shape, generator=source), alpha=0.1)
    model.save_pretrained(config.model_path)
    return model.eval()


def experts_shape(config: Config) -> dict[str, Any]:
    """Return what `batches.routed` needs of a model with experts."""
    facts = experts_of(build(config.model_path, device=None).config.to_dict())
    if facts is None:
        return {}
    return {
        "num_hidden_layers": facts.layers,
        "num_experts": facts.experts,
        "num_experts_per_tok": facts.experts_of_token,
    }


@torch.no_grad()
def logprobs_of(model: Any, tokens: Any) -> Any:
    """Return transformers' log-probs of the tokens of a sequence after the first, `[len - 1] float32`."""
    ids = torch.as_tensor(tokens).long()[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
