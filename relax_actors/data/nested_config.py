"""Configs of multimodal models: config.json holds a section for the decoder and one for each tower.

Reads such a config.json, and completes one that a TOML file describes, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any

from relax_actors.errors import ConfigError

_VISION = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
_VL = _VISION | {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_QWEN3_OMNI = _VL | {"audio": "<|audio_pad|>", "audio_start": "<|audio_start|>", "audio_end": "<|audio_end|>"}
_QWEN2_AUDIO = {"audio": "<|AUDIO|>", "audio_start": "<|audio_bos|>", "audio_end": "<|audio_eos|>"}
_QWEN2_5_OMNI = _QWEN2_AUDIO | {
    "image": "<|IMAGE|>",
    "video": "<|VIDEO|>",
    "vision_start": "<|vision_bos|>",
    "vision_end": "<|vision_eos|>",
}
SPECIAL_TOKENS: Mapping[str, Mapping[str, str]] = {
    "qwen2_vl": _VL,
    "qwen2_5_vl": _VL,
    "qwen3_vl": _VL,
    "qwen3_vl_moe": _VL,
    "qwen2_5_omni_thinker": _QWEN2_5_OMNI,
    "qwen3_omni_moe_thinker": _QWEN3_OMNI,
    "qwen2_audio": _QWEN2_AUDIO,
}
"""Special tokens of media by model type: text of each token by its role, as in the tokenizers of the real models."""
INDEXED = ("qwen2_5_omni_thinker", "qwen2_audio")
"""Model types whose config names the placeholders `*_token_index`."""
TOWERS = ("vision_config", "audio_config")
QWEN3_CHUNK = 50
"""`n_window` that the sound tower of Qwen3-Omni is written for: 13 tokens for each 100 frames."""


def is_nested(body: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a multimodal model."""
    return any(name in body for name in (*TOWERS, "thinker_config"))


def text_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the decoder, over those of the whole model; `model_type` stays that of the whole."""
    thinker = body.get("thinker_config", {})
    found = {**body, **thinker, **thinker.get("text_config", {}), **body.get("text_config", {})}
    return found | {name: body[name] for name in ("model_type",) if name in body}


def special_tokens(architecture: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of [model.architecture], text by role; empty for a text model.

    Raises:
        ConfigError: it has towers, and its model type is not supported.
    """
    if not is_nested(architecture):
        return {}
    model_type = str(architecture["model_type"])
    if model_type not in SPECIAL_TOKENS:
        msg = (
            f"model.architecture: multimodal models of type {model_type!r} are not supported; use one of "
            f"{', '.join(sorted(SPECIAL_TOKENS))}"
        )
        raise ConfigError(msg)
    return dict(SPECIAL_TOKENS[model_type])


def complete(architecture: Mapping[str, Any], ids: Mapping[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the config.json of a multimodal [model.architecture].

    Args:
        architecture: the section, with `text_config` and towers.
        ids: fields of the decoder that follow from the tokenizer and from each other.
        tokens: id of each special token by its role.
    """
    index = "index" if architecture["model_type"] in INDEXED else "id"
    keys = {role: f"{role}_token_{index if '_' not in role else 'id'}" for role in tokens}
    text = {**ids, **architecture.get("text_config", {})}
    return {keys[role]: number for role, number in tokens.items()} | {**architecture, "text_config": text}


def problems(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield what keeps the parts of a multimodal config from fitting each other."""
    body = body.get("thinker_config", body)
    text = text_fields(body)
    hidden = text.get("hidden_size")
    model_type = str(body.get("model_type"))
    yield from _rope_problems(text, model_type)
    vision, audio = body.get("vision_config", {}), body.get("audio_config", {})
    widths = {
        "vision_config.out_hidden_size": vision.get("out_hidden_size"),
        "audio_config.output_dim": audio.get("output_dim"),
    }
    if model_type == "qwen2_vl":
        widths = {"vision_config.hidden_size": vision.get("hidden_size")}
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
    window = audio.get("n_window", QWEN3_CHUNK)
    if model_type.startswith("qwen3_omni") and window != QWEN3_CHUNK:
        yield f"audio_config.n_window = {window}: the sound tower of Qwen3-Omni works with {QWEN3_CHUNK} only"


def _rope_problems(text: Mapping[str, Any], model_type: str) -> Iterator[str]:
    if model_type == "qwen2_audio":
        return
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rope.get("mrope_section")
    if sections is None:
        yield "text_config.rope_parameters has no mrope_section; add one, such as [2, 3, 3] for a head_dim of 16"
        return
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    width = text.get("head_dim") or (hidden // heads if heads and hidden else None)
    if width is not None and (len(sections) != 3 or 2 * sum(sections) != width):  # noqa: PLR2004 three axes
        yield (
            f"text_config.rope_parameters.mrope_section = {sections} must be three numbers that add up to half of "
            f"head_dim = {width}"
        )
    if model_type.startswith("qwen3") and not rope.get("mrope_interleaved"):
        yield f"text_config.rope_parameters of {model_type} needs mrope_interleaved = true"


def tower_parameters(body: Mapping[str, Any]) -> int:
    """Return the approximate number of parameters of the towers, from their configs: matrices of layers and mergers."""
    body = body.get("thinker_config", body)
    vision, audio = body.get("vision_config", {}), body.get("audio_config", {})
    width = vision.get("embed_dim") or vision.get("hidden_size", 0)
    total = vision.get("depth", 0) * _layer_parameters(width, vision.get("intermediate_size"))
    if width:
        joined = width * vision.get("spatial_merge_size", 2) ** 2
        merger = joined * (joined + vision.get("out_hidden_size", width))
        total += merger * (1 + len(vision.get("deepstack_visual_indexes", [])))
        total += 3 * vision.get("temporal_patch_size", 2) * vision.get("patch_size", 14) ** 2 * width
    return int(
        total
        + audio.get("encoder_layers", 0) * _layer_parameters(audio.get("d_model", 0), audio.get("encoder_ffn_dim"))
    )


def _layer_parameters(width: int, inner: int | None) -> int:
    return 4 * width**2 + 2 * width * (inner or 4 * width)
