"""Configs of multimodal models: sections for the decoder and each tower.

Reads such a config.json, and completes one that a TOML file describes, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any

from relax_actors.media.families import FamilySpec


def text_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's fields over the model's; `model_type` is the model's."""
    thinker = body.get("thinker_config", {})
    fields = {**body, **thinker, **thinker.get("text_config", {}), **body.get("text_config", {})}
    return fields | {name: body[name] for name in ("model_type",) if name in body}


def complete(
    architecture: Mapping[str, Any], spec: FamilySpec, fields: Mapping[str, Any], first: int
) -> dict[str, Any]:
    """Return the config.json of a multimodal [model.architecture].

    `fields` are those of the decoder that follow from the tokenizer and from each other; `first` is the id of the first
    special token of media, which the others follow.
    """
    ids = {
        (spec.placeholder_field if role in spec.kinds else "{}_token_id").format(role): first + number
        for number, role in enumerate(spec.tokens)
    }
    return ids | {**architecture, "text_config": {**fields, **architecture.get("text_config", {})}}


def problems(body: Mapping[str, Any], spec: FamilySpec) -> Iterator[str]:
    """Yield what keeps the parts of a multimodal config from fitting each other and its family."""
    body = body.get("thinker_config", body)
    text = text_fields(body)
    hidden = text.get("hidden_size")
    yield from _rope_problems(text, spec)
    vision, audio = body.get("vision_config", {}), body.get("audio_config", {})
    widths = {
        f"vision_config.{spec.vision_width}": vision.get(spec.vision_width),
        "audio_config.output_dim": audio.get("output_dim"),
    }
    for name, width in widths.items():
        if width is not None and hidden is not None and width != hidden:
            yield f"{name} = {width} is not text_config.hidden_size = {hidden}; make them equal"
    if (side := vision.get("num_position_embeddings")) and isqrt(side) ** 2 != side:
        yield f"vision_config.num_position_embeddings = {side} is not a square number"
    indexes, layers = vision.get("deepstack_visual_indexes", []), text.get("num_hidden_layers")
    if layers is not None and len(indexes) > layers:
        yield (
            f"vision_config.deepstack_visual_indexes has {len(indexes)} entries for {layers} layers of text_config; "
            "each needs a layer"
        )
    if (depth := vision.get("depth")) and (beyond := [index for index in indexes if index >= depth]):
        yield f"vision_config.deepstack_visual_indexes names layer {beyond[0]}; vision_config.depth is {depth}"
    chunk = spec.audio.chunk if spec.audio is not None else 0
    if chunk and 2 * (window := audio.get("n_window", chunk // 2)) != chunk:
        yield f"audio_config.n_window = {window}: the sound tower of {spec.model_type} works with {chunk // 2} only"


def _rope_problems(text: Mapping[str, Any], spec: FamilySpec) -> Iterator[str]:
    if spec.positions.sections == "one axis":
        return
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rope.get("mrope_section")
    if sections is None:
        yield "text_config.rope_parameters has no mrope_section; add one, such as [2, 3, 3] for a head_dim of 16"
        return
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    width = text.get("head_dim") or (hidden // heads if heads and hidden else None)
    turned = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    if width is not None and (len(sections) != 3 or 2 * sum(sections) != int(width * turned)):  # noqa: PLR2004 three axes
        part = "" if turned == 1 else f" x partial_rotary_factor = {turned:g}"
        yield (
            f"text_config.rope_parameters.mrope_section = {sections} must be three numbers that add up to half of "
            f"head_dim = {width}{part}"
        )
    if spec.positions.sections == "interleaved" and not rope.get("mrope_interleaved"):
        yield f"text_config.rope_parameters of {spec.model_type} needs mrope_interleaved = true"


def tower_parameters(body: Mapping[str, Any]) -> int:
    """Return the approximate parameters of the towers, by their configs."""
    body = body.get("thinker_config", body)
    vision, audio = body.get("vision_config", {}), body.get("audio_config", {})
    width = vision.get("embed_dim") or vision.get("hidden_size", 0)
    layers = vision.get("depth") or vision.get("num_hidden_layers", 0)
    total = layers * _layer_parameters(width, vision.get("intermediate_size"))
    if width:
        joined = width * vision.get("spatial_merge_size", 2) ** 2
        merger = joined * (joined + vision.get("out_hidden_size", width))
        total += merger * (1 + len(vision.get("deepstack_visual_indexes", [])))
        patch = vision.get("patch_size", 14)
        pixels = patch[0] * patch[1] if isinstance(patch, list) else patch**2
        total += 3 * vision.get("temporal_patch_size", 2) * pixels * width
    return int(
        total
        + audio.get("encoder_layers", 0) * _layer_parameters(audio.get("d_model", 0), audio.get("encoder_ffn_dim"))
    )


def _layer_parameters(width: int, inner: int | None) -> int:
    return 4 * width**2 + 2 * width * (inner or 4 * width)
