"""megatron-core settings derived from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_actors.config.media import is_nested
from relax_actors.data.model_folder import experts_of
from relax_actors.data.nested_config import text_fields
from relax_actors.engines.megatron.families import TEXT_FAMILIES, Architecture, Experts, ExpertSpec, Latent, TextFamily
from relax_actors.errors import ConfigError
from relax_actors.media.families import FAMILIES, FAMILIES_BY_TYPE

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""Scalings of the rotary positions that do not depend on the length of a sequence."""


def architecture_of(folder: Path) -> Architecture:
    """Read a model folder's architecture; raises ConfigError if megatron-core would compute another model."""
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
    family = TEXT_FAMILIES[whole.model_type if spec is None else spec.decoder.family]
    heads, rotary = int(fields["num_attention_heads"]), _rotary(fields)
    return Architecture(
        family=family,
        layers=int(fields["num_hidden_layers"]),
        hidden_size=int(fields["hidden_size"]),
        heads=heads,
        query_groups=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields["qk_rope_head_dim"]) if family.has_latent_attention else _head_dim(fields, heads),
        ffn_size=int(fields["intermediate_size"]),
        vocab_size=int(fields["vocab_size"]),
        context_length=int(fields["max_position_embeddings"]),
        norm_epsilon=float(fields["rms_norm_eps"]),
        rotary={**rotary, "partial_rotary_factor": _rotary_fraction(family, fields)},
        tied_embeddings=bool(fields["tie_word_embeddings"]),
        qk_layernorm=holds(family.qk_layernorm, fields),
        qkv_bias=holds(family.qkv_bias, fields),
        windows=_windows(family, fields) if spec is None else (None,) * int(fields["num_hidden_layers"]),
        experts=None if family.experts is None else _experts(family.experts, fields),
        latent=_latent(fields) if family.has_latent_attention else None,
        prefix="model." if spec is None else spec.decoder.prefix,
        rotary_sections=tuple(rotary.get("mrope_section") or ()),
        rotary_interleaved=spec is not None and spec.positions.sections == "interleaved",
        # torch counts a negative one from the end.
        padding=None if (padding := fields.get("pad_token_id")) is None else padding % int(fields["vocab_size"]),
        deepstack_layers=len(deepstack_indexes(whole.to_dict())),
    )


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
    """Refuse a config.json, with these fields of the decoder, that megatron-core would compute differently.

    Raises:
        ConfigError: lists every unsupported setting, one a line.
    """
    problems = []
    family = str(fields.get("model_type"))
    spec = FAMILIES_BY_TYPE.get(family)
    known = TEXT_FAMILIES.get(family if spec is None else spec.decoder.family)
    if known is None:
        media = [name for name, one in FAMILIES_BY_TYPE.items() if one.decoder.family in TEXT_FAMILIES]
        problems.append(f"model_type is {family!r}, supported are {', '.join((*TEXT_FAMILIES, *media))}")
    else:
        problems += _unsupported(known, fields, is_media=spec is not None)
    decoder = fields.get("text_model_type")
    if spec is not None and spec.decoder.is_open and decoder not in (None, spec.decoder.family):
        problems.append(f"text_config.model_type is {decoder!r}, supported is only {spec.decoder.family!r}")
    if problems:
        remedy = f'{setting} = "torch" trains what transformers computes'
        lines = [f'{setting} = "megatron": the model\'s {text}; {remedy}' for text in problems]
        raise ConfigError(*lines)


def _unsupported(family: TextFamily, fields: Mapping[str, Any], *, is_media: bool) -> Iterator[str]:
    """Yield the settings of a known family that megatron-core would compute differently."""
    for name, (value, supported) in family.unsupported(fields).items():
        yield f"{name} = {value!r} is not supported, only {supported!r}"
    rotary = _rotary(fields)
    # Older configs of multimodal models name their rule "mrope", which mrope_section says as well.
    kinds = ("default", "mrope") if is_media else ROPE_KINDS
    if (kind := rotary["rope_type"]) not in kinds:
        yield f"rope_type = {kind!r} is not supported, only {', '.join(map(repr, kinds))}"
    if is_media and fields.get("use_sliding_window"):
        yield "use_sliding_window = True is not supported, only False"
    fraction = _rotary_fraction(family, fields)
    if fraction != 1 and (family.rotary_fraction is None or kind != "default"):
        yield f"partial_rotary_factor = {fraction!r} is not supported here, only 1.0"
    if family.has_latent_attention and kind != "default":
        yield from _unsupported_scales(kind, rotary)
    if family.experts is not None and fields.get("num_experts_per_tok") == 1:
        yield "num_experts_per_tok = 1 is not supported, only 2 or more"
    groups, of_token = fields.get("n_group") or 1, fields.get("topk_group") or 1
    # megatron-core judges a group by as many experts as a token may get of it, transformers by two.
    if groups > 1 and fields.get("num_experts_per_tok", 2 * of_token) != 2 * of_token:
        yield f"num_experts_per_tok with n_group = {groups} is not supported, only twice topk_group = {of_token}"


def _unsupported_scales(kind: str, rotary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of the scores of latent attention that megatron-core would compute differently."""
    if rotary.get("mscale") != rotary.get("mscale_all_dim"):
        yield f"mscale = {rotary.get('mscale')!r} is not supported, only that of mscale_all_dim"
    elif kind == "yarn" and not rotary.get("mscale"):
        # transformers multiplies the part with rotary positions by a factor of its own then.
        yield "rope_type = 'yarn' without mscale is not supported; name mscale and mscale_all_dim"
    if (factor := rotary.get("attention_factor")) is not None:
        yield f"attention_factor = {factor!r} is not supported, only mscale"


def _head_dim(fields: Mapping[str, Any], heads: int) -> int:
    spec = FAMILIES.get(fields["model_type"])
    given = None if spec is not None and spec.decoder.ignores_head_dim else fields.get("head_dim")
    return int(given or fields["hidden_size"] // heads)


def _rotary(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary position settings, in the form of transformers 5 or of transformers 4."""
    old = fields.get("rope_scaling") or {}
    kind = old.get("rope_type") or old.get("type") or "default"
    return {**old, "rope_type": kind, "rope_theta": fields.get("rope_theta")} | (fields.get("rope_parameters") or {})


def _rotary_fraction(family: TextFamily, fields: Mapping[str, Any]) -> float:
    given = _rotary(fields).get("partial_rotary_factor") or fields.get("partial_rotary_factor")
    return float(given or family.rotary_fraction or 1.0)


def _windows(family: TextFamily, fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Window of each layer; transformers removes `sliding_window` where `use_sliding_window` is false."""
    layers, window = int(fields["num_hidden_layers"]), fields.get("sliding_window")
    if not family.has_windows or not window:
        return (None,) * layers
    kinds = fields.get("layer_types") or ["sliding_attention"] * layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def holds(rule: bool | str, fields: Mapping[str, Any], *, default: bool = False) -> bool:  # noqa: FBT001 see TextFamily
    """Whether a rule of a family holds for a model: one for all, or the field that says so."""
    return bool(fields.get(rule, default)) if isinstance(rule, str) else rule


def _latent(fields: Mapping[str, Any]) -> Latent:
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return Latent(fields.get("q_lora_rank"), *(int(fields[name]) for name in names))


def _experts(spec: ExpertSpec, fields: Mapping[str, Any]) -> Experts:
    """Read the experts of a complete config.json."""
    facts = experts_of(fields)
    if facts is None:
        msg = f"model.path: the config.json of a {fields['model_type']} model names no experts; set num_experts"
        raise ConfigError(msg)
    return Experts(
        spec,
        facts.experts,
        facts.experts_of_token,
        int(fields[spec.width]),
        # Qwen3-VL-MoE has no such field and normalises.
        holds(spec.normalises, fields, default=True),
        facts.without,
        spec.shared_width(fields),
        (int(fields.get("n_group") or 1), int(fields.get("topk_group") or 1)),
        float(fields.get("routed_scaling_factor") or 1.0),
    )
