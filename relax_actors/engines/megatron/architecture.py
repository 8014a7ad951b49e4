"""A Hugging Face config in the words of megatron-core: derived from config.json, nothing typed a second time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_actors.errors import ConfigError

FAMILIES = ("llama", "qwen3", "qwen3_moe")
_WANTED: dict[str, tuple[Any, ...]] = {
    # What megatron-core would silently do otherwise, and the values with which it does not.
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
    """A decoder of the Llama family: RMSNorm, rotary positions, grouped queries, gated MLP or experts."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_width: int
    mlp_width: int
    vocabulary: int
    context_length: int
    epsilon: float
    rotary_base: float
    tied: bool
    norms_of_heads: bool
    """Whether queries and keys are normalised."""
    experts: int
    experts_of_token: int
    expert_width: int
    weights_renormalised: bool
    """Whether the weights of a token's experts add up to 1."""

    @classmethod
    def of(cls, folder: Path) -> Architecture:
        """The architecture of a model folder.

        Raises:
            ConfigError: transformers does not know it, or megatron-core would compute something else.
        """
        from transformers import AutoConfig  # noqa: PLC0415 `check` costs no torch

        try:
            found = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            msg = f"model.path {folder} holds no config that transformers reads: {error}"
            raise ConfigError(msg) from error
        fields: dict[str, Any] = found.to_dict()
        fields |= {name: fields[own] for name, own in found.attribute_map.items() if own in fields}
        check(fields)
        heads = int(fields["num_attention_heads"])
        is_moe = fields["model_type"] == "qwen3_moe"
        return cls(
            layers=int(fields["num_hidden_layers"]),
            hidden=int(fields["hidden_size"]),
            heads=heads,
            groups=int(fields.get("num_key_value_heads") or heads),
            head_width=int(fields.get("head_dim") or fields["hidden_size"] // heads),
            mlp_width=int(fields["intermediate_size"]),
            vocabulary=int(fields["vocab_size"]),
            context_length=int(fields["max_position_embeddings"]),
            epsilon=float(fields["rms_norm_eps"]),
            rotary_base=float(_rotary(fields)["rope_theta"]),
            tied=bool(fields["tie_word_embeddings"]),
            norms_of_heads=fields["model_type"].startswith("qwen3"),
            experts=int(fields["num_experts"]) if is_moe else 0,
            experts_of_token=int(fields["num_experts_per_tok"]) if is_moe else 0,
            expert_width=int(fields["moe_intermediate_size"]) if is_moe else 0,
            weights_renormalised=bool(fields["norm_topk_prob"]) if is_moe else False,
        )

    def in_megatron(self) -> dict[str, Any]:
        """Arguments of megatron-core's TransformerConfig."""
        dense = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.head_width,
            "ffn_hidden_size": self.mlp_width,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.epsilon,
            "gated_linear_unit": True,
            "qk_layernorm": self.norms_of_heads,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            # Asked of a model without experts, too, where micro-batches differ in length.
            "moe_token_dispatcher_type": "alltoall",
        }
        if not self.experts:
            return dense
        return dense | {
            "num_moe_experts": self.experts,
            "moe_router_topk": self.experts_of_token,
            "moe_ffn_hidden_size": self.expert_width,
            # The router's softmax over all experts, or over those chosen, which is the same as renormalising.
            "moe_router_pre_softmax": not self.weights_renormalised,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
        }


def check(fields: Mapping[str, Any]) -> None:
    """Refuse a config.json that megatron-core would take for another model.

    Raises:
        ConfigError: one line a reason.
    """
    found = []
    family = fields.get("model_type")
    if family not in FAMILIES:
        found.append(f"model_type is {family!r}, known are {', '.join(FAMILIES)}")
    for name, wanted in _WANTED.items():
        value = fields.get(name, wanted[0])
        if value not in wanted:
            found.append(f"{name} = {value!r} is not supported, only {wanted[-1]!r}")
    if (kind := _rotary(fields).get("rope_type", "default")) != "default":
        found.append(f"rope_type = {kind!r} is not supported, only 'default'")
    if found:
        raise ConfigError("\n".join(f'trainer.backend = "megatron": the model\'s {text}' for text in found))


def _rotary(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of the rotary positions, where transformers 5 has them or where 4 had them."""
    old = fields.get("rope_scaling") or {}
    kind = old.get("rope_type") or old.get("type") or "default"
    return {"rope_type": kind, "rope_theta": fields.get("rope_theta")} | (fields.get("rope_parameters") or {})
