"""Weights of a decoder's layer in megatron-core, and the Hugging Face tensors that hold the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relax_actors.engines.megatron.families.spec import Architecture, Latent

QKV, QKV_BIAS = "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"
FC1, FC2 = "linear_fc1.weight", "linear_fc2.weight"
LATENT = tuple(
    f"self_attention.linear_{part}.weight"
    for part in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
)
"""Projections of latent attention."""


@dataclass(frozen=True, slots=True)
class Weight:
    """Parameters of megatron-core, and the Hugging Face tensors that hold the same numbers.

    Attributes:
        keys: names of the parameters in a layer, or in the model; several if one tensor holds those of all experts.
        names: names of the tensors, in the same scope.
        shapes: shapes of the tensors.
        form: how tensors become a parameter. "same": they are equal; "stacked": it holds one tensor above the other;
            "groups": queries, keys and values of a query group follow each other; "experts": a tensor holds the
            parameters of all experts, or files store the tensors of each expert separately; "padded": it has more rows.
        parts: for experts, the names under which files store those of one expert.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    form: Literal["same", "stacked", "groups", "experts", "padded"] = "same"
    parts: tuple[str, ...] = ()


def same(key: str, name: str, *shape: int) -> Weight:
    """Return a parameter that equals a tensor."""
    return Weight((key,), (name,), (shape,))


def layer_weights(model: Architecture, number: int) -> tuple[Weight, ...]:
    """Return the weights of a layer with the names of the Llama family."""
    hidden = model.hidden_size
    return (
        same("input_layernorm.weight", "input_layernorm.weight", hidden),
        *(_latent_attention(model, model.latent) if model.latent else _attention(model)),
        same("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden),
        *(_experts(model) if model.has_experts(number) else _feed_forward("mlp", "mlp", hidden, model.ffn_size)),
    )


def _attention(model: Architecture) -> tuple[Weight, ...]:
    hidden, width = model.hidden_size, model.head_dim
    rows = model.heads * width, model.query_groups * width, model.query_groups * width
    names = [f"self_attn.{part}_proj" for part in "qkv"]
    weight = Weight((QKV,), tuple(f"{n}.weight" for n in names), tuple((size, hidden) for size in rows), "groups")
    bias = Weight((QKV_BIAS,), tuple(f"{n}.bias" for n in names), tuple((size,) for size in rows), "groups")
    norms = tuple(same(f"self_attention.{n}_layernorm.weight", f"self_attn.{n}_norm.weight", width) for n in "qk")
    return (
        weight,
        *((bias,) if model.qkv_bias else ()),
        *(norms if model.qk_layernorm else ()),
        same("self_attention.linear_proj.weight", "self_attn.o_proj.weight", hidden, rows[0]),
    )


def _latent_attention(model: Architecture, latent: Latent) -> tuple[Weight, ...]:
    hidden, width = model.hidden_size, latent.rope_dims + latent.nope_dims
    queries: tuple[Weight, ...] = (_latent("q_proj", "q_proj", model.heads * width, hidden),)
    if latent.queries is not None:
        queries = (
            _latent("q_down_proj", "q_a_proj", latent.queries, hidden),
            same("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", latent.queries),
            _latent("q_up_proj", "q_b_proj", model.heads * width, latent.queries),
        )
    return (
        *queries,
        _latent("kv_down_proj", "kv_a_proj_with_mqa", latent.keys + latent.rope_dims, hidden),
        same("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", latent.keys),
        _latent("kv_up_proj", "kv_b_proj", model.heads * (latent.nope_dims + latent.values), latent.keys),
        same("self_attention.linear_proj.weight", "self_attn.o_proj.weight", hidden, model.heads * latent.values),
    )


def _latent(key: str, name: str, rows: int, columns: int) -> Weight:
    return same(f"self_attention.linear_{key}.weight", f"self_attn.{name}.weight", rows, columns)


def _feed_forward(key: str, name: str, hidden: int, width: int) -> tuple[Weight, ...]:
    up = (f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
    return (
        Weight((f"{key}.{FC1}",), up, ((width, hidden),) * 2, "stacked"),
        same(f"{key}.{FC2}", f"{name}.down_proj.weight", hidden, width),
    )


def _experts(model: Architecture) -> tuple[Weight, ...]:
    """Return the weights of a feed-forward layer with experts."""
    experts, hidden = model.experts, model.hidden_size
    if experts is None:
        return ()
    count, width = experts.number, experts.ffn_size
    keys = [tuple(f"mlp.experts.{expert}.{name}" for expert in range(count)) for name in (FC1, FC2)]
    of_all = ("mlp.experts.gate_up_proj",), ("mlp.experts.down_proj",)
    of_one = [tuple(f"mlp.experts.{{}}.{part}_proj.weight" for part in parts) for parts in (("gate", "up"), ("down",))]
    shared = f"mlp.{experts.spec.shared}"
    return (
        same("mlp.router.weight", "mlp.gate.weight", count, hidden),
        *(
            (same("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", count),)
            if experts.spec.has_bias
            else ()
        ),
        Weight(keys[0], of_all[0], ((count, 2 * width, hidden),), "experts", of_one[0]),
        Weight(keys[1], of_all[1], ((count, hidden, width),), "experts", of_one[1]),
        *(_feed_forward("mlp.shared_experts", shared, hidden, experts.shared_size) if experts.shared_size else ()),
        *(
            (same("mlp.shared_experts.gate_weight", f"{shared}_gate.weight", 1, hidden),)
            if experts.spec.has_shared_gate
            else ()
        ),
    )
