"""megatron-core settings derived from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_actors.config.media import is_nested
from relax_actors.data.nested_config import text_fields
from relax_actors.errors import ConfigError
from relax_actors.media.families import FAMILIES, FAMILIES_BY_TYPE

TEXT_FAMILIES = ("llama", "qwen3", "qwen3_moe")
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
    qkv_bias: bool
    """Whether the projections to queries, keys and values have a bias."""
    experts: int
    experts_per_token: int
    expert_ffn_size: int
    normalises_top_k: bool
    """Whether the router weights of a token's experts are normalised to sum to 1."""
    prefix: str = "model."
    """Prefix of the decoder's Hugging Face names."""
    rotary_sections: tuple[int, ...] = ()
    """Frequencies that turn by the temporal, vertical and horizontal position; empty if all turn by one position."""
    rotary_interleaved: bool = False
    """Whether the frequencies of the three axes alternate instead of following each other."""
    deepstack_layers: int = 0
    """Number of first layers whose output features of images and videos are added to."""

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
        whole = getattr(config, "thinker_config", config)
        text = whole.get_text_config()
        fields: dict[str, Any] = text.to_dict()
        fields |= {name: fields[own] for name, own in text.attribute_map.items() if own in fields}
        # transformers ties the embeddings of a multimodal model by the whole config.
        fields |= {"model_type": whole.model_type, "tie_word_embeddings": getattr(whole, "tie_word_embeddings", False)}
        check(fields)
        spec = FAMILIES.get(whole.model_type)
        decoder = whole.model_type if spec is None else spec.decoder.family
        heads, is_moe, rotary = int(fields["num_attention_heads"]), "moe" in decoder, _rotary(fields)
        return cls(
            layers=int(fields["num_hidden_layers"]),
            hidden_size=int(fields["hidden_size"]),
            heads=heads,
            query_groups=int(fields.get("num_key_value_heads") or heads),
            head_dim=_head_dim(fields, heads),
            ffn_size=int(fields["intermediate_size"]),
            vocab_size=int(fields["vocab_size"]),
            context_length=int(fields["max_position_embeddings"]),
            norm_epsilon=float(fields["rms_norm_eps"]),
            rotary_base=float(rotary["rope_theta"]),
            tied_embeddings=bool(fields["tie_word_embeddings"]),
            qk_layernorm=decoder.startswith("qwen3"),
            qkv_bias=decoder == "qwen2",
            experts=int(fields["num_experts"]) if is_moe else 0,
            experts_per_token=int(fields["num_experts_per_tok"]) if is_moe else 0,
            expert_ffn_size=int(fields["moe_intermediate_size"]) if is_moe else 0,
            normalises_top_k=bool(fields.get("norm_topk_prob", True)) if is_moe else False,
            prefix="model." if spec is None else spec.decoder.prefix,
            rotary_sections=tuple(rotary.get("mrope_section") or ()),
            rotary_interleaved=spec is not None and spec.positions.sections == "interleaved",
            deepstack_layers=len(deepstack_indexes(whole.to_dict())),
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
            "add_qkv_bias": self.qkv_bias,
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


def decoder_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that describe the decoder, with the model type of the whole model."""
    if not is_nested(body):
        return dict(body)
    text = body.get("thinker_config", body).get("text_config") or {}
    return text_fields(body) | {"text_model_type": text.get("model_type")}


def deepstack_indexes(body: Mapping[str, Any]) -> list[int]:
    """Return the layers of the tower whose features are added to the first layers of the decoder, of a config.json."""
    vision = body.get("thinker_config", body).get("vision_config") or {}
    return list(vision.get("deepstack_visual_indexes") or [])


def check(fields: Mapping[str, Any], setting: str = "trainer.backend") -> None:
    """Refuse a config.json that megatron-core would compute differently.

    Args:
        fields: of the decoder; see `decoder_fields`.
        setting: configuration key that names the backend, for errors.

    Raises:
        ConfigError: lists every unsupported setting, one a line.
    """
    problems = []
    family = str(fields.get("model_type"))
    spec = FAMILIES_BY_TYPE.get(family)
    if spec is None and family not in TEXT_FAMILIES:
        problems.append(f"model_type is {family!r}, supported are {', '.join((*TEXT_FAMILIES, *FAMILIES_BY_TYPE))}")
    decoder = fields.get("text_model_type")
    if spec is not None and spec.decoder.is_open and decoder not in (None, spec.decoder.family):
        problems.append(f"text_config.model_type is {decoder!r}, supported is only {spec.decoder.family!r}")
    for name, supported in _SUPPORTED_VALUES.items():
        value = fields.get(name, supported[0])
        if value not in supported:
            problems.append(f"{name} = {value!r} is not supported, only {supported[-1]!r}")
    # Older configs of multimodal models name their rule "mrope", which mrope_section says as well.
    if (kind := _rotary(fields).get("rope_type", "default")) not in ("default", "mrope"):
        problems.append(f"rope_type = {kind!r} is not supported, only 'default'")
    if problems:
        raise ConfigError("\n".join(f'{setting} = "megatron": the model\'s {text}' for text in problems))


def _head_dim(fields: Mapping[str, Any], heads: int) -> int:
    spec = FAMILIES.get(fields["model_type"])
    given = None if spec is not None and spec.decoder.ignores_head_dim else fields.get("head_dim")
    return int(given or fields["hidden_size"] // heads)


def _rotary(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary position settings, in the form of transformers 5 or of transformers 4."""
    old = fields.get("rope_scaling") or {}
    kind = old.get("rope_type") or old.get("type") or "default"
    return {"rope_type": kind, "rope_theta": fields.get("rope_theta")} | (fields.get("rope_parameters") or {})
