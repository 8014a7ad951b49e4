"""What the file of a text family declares for megatron-core, and what follows from it for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Fields = Mapping[str, Any]
"""Fields of a config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """Experts of a family; which layers have them, and how many, is read by `data.model_folder.experts_of`.

    Attributes:
        width: field with the feed-forward size of an expert.
        scores: function that makes weights of the router's logits.
        normalises: whether the weights of a token's experts sum to 1, or the field that says so.
        has_bias: whether a bias, which is not trained, is added to the scores for the choice alone.
        shared: name of the module with the shared experts, which compute every token; empty without shared experts.
        shared_width: returns their feed-forward size.
        has_shared_gate: whether a gate weighs their output.
    """

    width: str = "moe_intermediate_size"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalises: bool | str = "norm_topk_prob"
    has_bias: bool = False
    shared: str = ""
    shared_width: Callable[[Fields], int] = lambda _: 0
    has_shared_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFamily:
    """Differences of a family from Llama, as megatron-core computes it.

    Attributes:
        model_type: in config.json.
        supported: values of fields that megatron-core computes, the usual one last. It would ignore others silently.
        qk_layernorm: whether queries and keys are normalised, or the field that says so.
        qkv_bias: whether the projections to queries, keys and values have a bias, or the field that says so.
        has_windows: whether the family reads `sliding_window`.
        rotary_fraction: share of a head's dimensions with rotary positions, where config.json does not say; None
            for all of them.
        has_latent_attention: whether queries, keys and values are made of latent vectors (MLA).
        experts: how a token's experts compute; None for a family without.
        stored_names: parts of the names of weights in transformers, each with that in files of the hub.
    """

    model_type: str
    supported: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    qk_layernorm: bool | str = False
    qkv_bias: bool | str = False
    has_windows: bool = True
    rotary_fraction: float | None = None
    has_latent_attention: bool = False
    experts: ExpertSpec | None = None
    stored_names: tuple[tuple[str, str], ...] = ()

    def unsupported(self, fields: Fields) -> dict[str, tuple[Any, Any]]:
        """Return the fields that megatron-core would ignore, each with its value and the supported one."""
        supported = SUPPORTED | self.supported
        given = {name: fields.get(name, values[0]) for name, values in supported.items()}
        return {name: (given[name], values[-1]) for name, values in supported.items() if given[name] not in values}


SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "quantization_config": (None,),
}
"""Values of fields that megatron-core computes, where a family does not name others."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a model.

    Attributes:
        spec: of the family.
        number: experts of a layer.
        per_token: experts that a token is routed to.
        ffn_size: feed-forward size of an expert.
        normalises: whether the router weights of a token's experts sum to 1.
        without: numbers of the layers without experts.
        shared_size: feed-forward size of the experts that compute every token; 0 without them.
        groups: groups of experts, and those of them from which a token's experts are chosen.
        scale: factor of the router weights.
    """

    spec: ExpertSpec
    number: int
    per_token: int
    ffn_size: int
    normalises: bool
    without: tuple[int, ...]
    shared_size: int
    groups: tuple[int, int]
    scale: float

    def transformer_config_arguments(self, layers: int) -> dict[str, Any]:
        """Keyword arguments for megatron-core's TransformerConfig."""
        is_softmax, (groups, of_token) = self.spec.scores == "softmax", self.groups
        return {
            "num_moe_experts": self.number,
            "moe_router_topk": self.per_token,
            "moe_ffn_hidden_size": self.ffn_size,
            "moe_layer_freq": [int(layer not in self.without) for layer in range(layers)],
            "moe_shared_expert_intermediate_size": self.shared_size or None,
            "moe_shared_expert_gate": self.spec.has_shared_gate,
            "moe_router_score_function": self.spec.scores,
            # A softmax over the chosen experts only equals a softmax over all experts that is then normalised.
            "moe_router_pre_softmax": is_softmax and not self.normalises,
            "moe_router_num_groups": groups if groups > 1 else None,
            "moe_router_group_topk": of_token if groups > 1 else None,
            "moe_router_topk_scaling_factor": self.scale if self.scale != 1 else None,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
        }


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of latent attention.

    Attributes:
        queries: size of the latent vector of a token's queries; None if they are made of its hidden state.
        keys: size of the latent vector of its keys and values.
        rope_dims: dimensions of a head of queries and keys with rotary positions.
        nope_dims: those without.
        values: dimensions of a head of values.
    """

    queries: int | None
    keys: int
    rope_dims: int
    nope_dims: int
    values: int

    def transformer_config_arguments(self, rotary: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for megatron-core's MLATransformerConfig."""
        return {
            "q_lora_rank": self.queries,
            "kv_lora_rank": self.keys,
            "qk_head_dim": self.nope_dims,
            "qk_pos_emb_head_dim": self.rope_dims,
            "v_head_dim": self.values,
            "qk_layernorm": True,
            # The frequencies of YaRN are set afterwards; the factor of its scores follows from these two.
            "rope_type": "rope",
            "rotary_scaling_factor": float(rotary.get("factor") or 1.0),
            "mscale_all_dim": float(rotary.get("mscale_all_dim") or 0.0),
        }


@dataclass(frozen=True, slots=True)
class Architecture:
    """Decoder of the Llama family.

    RMSNorm, rotary positions, grouped-query attention, and a gated MLP or experts.
    """

    family: TextFamily
    layers: int
    hidden_size: int
    heads: int
    query_groups: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rotary: Mapping[str, Any]
    """Rotary positions as transformers describes them: `rope_type`, `rope_theta` and the settings of the scaling."""
    tied_embeddings: bool
    qk_layernorm: bool
    """Whether queries and keys are normalised."""
    qkv_bias: bool
    """Whether the projections to queries, keys and values have a bias."""
    windows: tuple[int | None, ...]
    """Keys that a query of each layer attends to, its own included; None for all before it."""
    experts: Experts | None
    latent: Latent | None
    prefix: str = "model."
    """Prefix of the decoder's Hugging Face names."""
    rotary_sections: tuple[int, ...] = ()
    """Frequencies that turn by the temporal, vertical and horizontal position; empty if all turn by one position."""
    rotary_interleaved: bool = False
    """Whether the frequencies of the three axes alternate instead of following each other."""
    padding: int | None = None
    """Token whose embedding is not trained."""
    deepstack_layers: int = 0
    """Number of first layers whose output features of images and videos are added to."""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and layer not in self.experts.without

    def transformer_config_arguments(self) -> dict[str, Any]:
        """Keyword arguments for megatron-core's TransformerConfig."""
        window = next((window for window in self.windows if window), None)
        arguments = {
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
            "window_size": None if window is None else (window - 1, 0),
            "window_attn_skip_freq": None if window is None else [int(bool(window)) for window in self.windows],
            # With variable_seq_lengths megatron-core requires this setting of dense models as well.
            "moe_token_dispatcher_type": "alltoall",
        }
        if self.experts is not None:
            arguments |= self.experts.transformer_config_arguments(self.layers)
        if self.latent is not None:
            arguments |= self.latent.transformer_config_arguments(self.rotary)
        return arguments
