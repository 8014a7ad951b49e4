"""megatron-core settings derived from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_actors.errors import ConfigError

FAMILIES = ("llama", "qwen3", "qwen3_moe")
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    # megatron-core would silently ignore any other value of these settings and compute a different model.
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Decoder of the Llama family.

    RMSNorm, rotary positions, grouped-query attention, and a gated MLP or experts.
    """

    layers: int
    hidden_size: int
    heads: int
    query_groups: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rotary_base: float
    tied_embeddings: bool
    qk_layernorm: bool
    """Whether queries and keys are normalised."""
    experts: int
    experts_per_token: int
    expert_ffn_size: int
    normalises_top_k: bool
    """Whether the router weights of a token's experts are normalised to sum to 1."""

    @classmethod
    def of(cls, folder: Path) -> Architecture:
        """Read the architecture of a model folder.

        Raises:
            ConfigError: transformers cannot read config.json, or megatron-core would compute a different model.
        """
        from transformers import AutoConfig  # noqa: PLC0415 `relax check` does not import torch

        try:
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            msg = f"model.path {folder} has no config.json that transformers can read: {error}"
            raise ConfigError(msg) from error
        fields: dict[str, Any] = config.to_dict()
        fields |= {name: fields[own] for name, own in config.attribute_map.items() if own in fields}
        check(fields)
        heads = int(fields["num_attention_heads"])
        is_moe = fields["model_type"] == "qwen3_moe"
        return cls(
            layers=int(fields["num_hidden_layers"]),
            hidden_size=int(fields["hidden_size"]),
            heads=heads,
            query_groups=int(fields.get("num_key_value_heads") or heads),
            head_dim=int(fields.get("head_dim") or fields["hidden_size"] // heads),
            ffn_size=int(fields["intermediate_size"]),
            vocab_size=int(fields["vocab_size"]),
            context_length=int(fields["max_position_embeddings"]),
            norm_epsilon=float(fields["rms_norm_eps"]),
            rotary_base=float(_rotary(fields)["rope_theta"]),
            tied_embeddings=bool(fields["tie_word_embeddings"]),
            qk_layernorm=fields["model_type"].startswith("qwen3"),
            experts=int(fields["num_experts"]) if is_moe else 0,
            experts_per_token=int(fields["num_experts_per_tok"]) if is_moe else 0,
            expert_ffn_size=int(fields["moe_intermediate_size"]) if is_moe else 0,
            normalises_top_k=bool(fields["norm_topk_prob"]) if is_moe else False,
        )

    def transformer_config_arguments(self) -> dict[str, Any]:
        """Keyword arguments for megatron-core's TransformerConfig."""
        dense = {
            "num_layers": self.layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.heads,
            "num_query_groups": self.query_groups,
            "kv_channels": self.head_dim,
            "ffn_hidden_size": self.ffn_size,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_epsilon,
            "gated_linear_unit": True,
            "qk_layernorm": self.qk_layernorm,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            # With variable_seq_lengths megatron-core requires this setting of dense models as well.
            "moe_token_dispatcher_type": "alltoall",
        }
        if not self.experts:
            return dense
        return dense | {
            "num_moe_experts": self.experts,
            "moe_router_topk": self.experts_per_token,
            "moe_ffn_hidden_size": self.expert_ffn_size,
            # A softmax over the chosen experts only equals a softmax over all experts that is then normalised.
            "moe_router_pre_softmax": not self.normalises_top_k,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
        }


def check(fields: Mapping[str, Any], setting: str = "trainer.backend") -> None:
    """Refuse a config.json that megatron-core would compute differently.

    Args:
        fields: of the config.json.
        setting: configuration key that names the backend, for errors.

    Raises:
        ConfigError: lists every unsupported setting, one a line.
    """
    problems = []
    family = fields.get("model_type")
    if family not in FAMILIES:
        problems.append(f"model_type is {family!r}, supported are {', '.join(FAMILIES)}")
    for name, supported in _SUPPORTED_VALUES.items():
        value = fields.get(name, supported[0])
        if value not in supported:
            problems.append(f"{name} = {value!r} is not supported, only {supported[-1]!r}")
    if (kind := _rotary(fields).get("rope_type", "default")) != "default":
        problems.append(f"rope_type = {kind!r} is not supported, only 'default'")
    if problems:
        raise ConfigError("\n".join(f'{setting} = "megatron": the model\'s {text}' for text in problems))


def _rotary(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary position settings, in the form of transformers 5 or of transformers 4."""
    old = fields.get("rope_scaling") or {}
    kind = old.get("rope_type") or old.get("type") or "default"
    return {"rope_type": kind, "rope_theta": fields.get("rope_theta")} | (fields.get("rope_parameters") or {})
