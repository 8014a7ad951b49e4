"""Families of multimodal models, read from the files of a model folder."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from math import isqrt
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from relax_actors.config.media import is_nested
from relax_actors.errors import ConfigError
from relax_actors.media.families import FAMILIES_BY_TYPE, REFUSED
from relax_actors.media.families.spec import AudioSpec, FamilySpec, VisionSpec
from relax_actors.media.processor_files import ProcessorFiles, read_processor_files
from relax_actors.messages.media import AUDIO


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a multimodal model that its preprocessing needs.

    Attributes:
        spec: what holds for every model of the family.
        ids: token ids by role, as in `FamilySpec.tokens`.
        vision: preprocessing of images and videos, if the model takes them.
        audio: preprocessing of sounds, if the model takes them.
        seconds_scale: rotary positions a second of video.
        chunk_seconds: seconds of video that come before the sound of the same seconds (Qwen2.5-Omni).
    """

    spec: FamilySpec
    ids: dict[str, int] = field(hash=False)
    vision: VisionSpec | None
    audio: AudioSpec | None
    seconds_scale: float = 1.0
    chunk_seconds: float = 2.0

    @property
    def model_type(self) -> str:
        """Model type in config.json, of the thinker for omni models."""
        return self.spec.model_type

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of media that the model takes."""
        return self.spec.kinds

    @property
    def barred(self) -> tuple[int, ...]:
        """Ids that a response never contains."""
        return tuple(sorted(set(self.ids.values())))

    @property
    def marks(self) -> dict[str, int]:
        """Id that a prompt has for a medium before it is expanded, by its kind."""
        return {kind: self.ids[self.spec.marks.get(kind, kind)] for kind in self.kinds}

    @property
    def kinds_by_id(self) -> dict[int, str]:
        """Kinds of media by their ids: marks, and placeholders, which only expansion writes."""
        return {self.ids[kind]: kind for kind in self.kinds} | {mark: kind for kind, mark in self.marks.items()}

    @property
    def position_dtype(self) -> str:
        """Type of rotary positions."""
        return self.spec.positions.dtype

    @property
    def reading(self) -> tuple[Hashable, ...]:
        """What decides a prompt's features, placeholders and positions, for comparison."""
        rules = (self.spec.positions, self.spec.timestamp, self.spec.around, self.seconds_scale, self.chunk_seconds)
        return (*sorted(self.ids.items()), self.vision, self.audio, *rules)

    def marker(self, kind: str, tokenizer: Tokenizer) -> str:
        """Return the text of one medium in a prompt that no chat template has written."""
        if self.spec.brackets:
            return tokenizer.id_to_token(self.marks[kind]) or ""
        span = AUDIO if kind == AUDIO else "vision"
        ids = (self.ids.get(f"{span}_start"), self.ids[kind], self.ids.get(f"{span}_end"))
        return "".join(tokenizer.id_to_token(token) or "" for token in ids if token is not None)


def family_of(folder: Path) -> Family | None:
    """Return a model folder's family, None for text; raises ConfigError."""
    path = folder / "config.json"
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ConfigError(msg) from error
    spec = spec_of_body(body, str(path)) if isinstance(body, dict) else None
    if spec is None:
        return None
    body, files = body.get("thinker_config", body), read_processor_files(folder, spec.vision)
    if spec.vision is not None and body.get("downsample_ratio", wanted := 1 / spec.vision.merge) != wanted:
        msg = f"{path}: downsample_ratio = {body['downsample_ratio']} is not supported; it must be {wanted}"
        raise ConfigError(msg)
    try:
        return Family(
            spec,
            token_ids(body, spec, folder),
            None if spec.vision is None else _vision(spec, spec.vision, body, files),
            None if spec.audio is None else _audio(spec.audio, body["audio_config"], files),
            spec.positions.scale(body),
            float(body.get("seconds_per_chunk", 2)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"{path} is not the config of a {spec.model_type} model: {type(error).__name__} {error}"
        raise ConfigError(msg) from error


def spec_of_body(
    body: dict[str, Any], where: str, known: Mapping[str, FamilySpec] = FAMILIES_BY_TYPE
) -> FamilySpec | None:
    """Return the family that a model's config names; None for a text model.

    Args:
        body: content of config.json, or a [model.architecture].
        where: its origin, for errors.
        known: families by model type.

    Raises:
        ConfigError: the model takes media and is of no known family.
    """
    model_type = str(body.get("model_type"))
    spec = known.get(model_type)
    if spec is None and is_nested(body):
        supported = ", ".join(sorted(known))
        why = f": {REFUSED[model_type]}" if model_type in REFUSED else ""
        msg = f"{where}: multimodal models of type {model_type!r} are not supported{why}; choose one of: {supported}"
        raise ConfigError(msg)
    return spec


def _vision(spec: FamilySpec, default: VisionSpec, model: dict[str, Any], files: ProcessorFiles) -> VisionSpec:
    body = model["vision_config"]
    patch = _number(body.get("patch_size", default.patch))
    merge = _number(body.get("spatial_merge_size", default.merge))
    if tokens := model.get("mm_tokens_per_image"):
        merge = _side(body.get("image_size", default.tile), patch) // patch // isqrt(tokens)
        if (patch * merge * isqrt(tokens), isqrt(tokens) ** 2) != (body.get("image_size", default.tile), tokens):
            msg = (
                f"mm_tokens_per_image = {tokens} does not divide an image of vision_config.image_size = "
                f"{body.get('image_size', default.tile)} into squares of whole patches of {patch} pixels; take a square"
            )
            raise ConfigError(msg)
    sizes = {
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": _number(body.get("temporal_patch_size", default.temporal)),
    }
    files.must_agree(sizes, "vision_config")
    if _number(body.get("in_channels", body.get("in_chans", 3))) != 3:  # noqa: PLR2004 red, green, blue
        msg = "vision_config.in_channels must be 3"
        raise ConfigError(msg)
    video, tile = files.video, 0
    if default.tile:
        tile = _side(body.get("image_size", default.tile), patch * merge)
        files.must_be_square(tile)
    return replace(
        default,
        patch=patch,
        merge=merge,
        temporal=sizes["temporal_patch_size"],
        mean=files.channels("image_mean", default.mean),
        std=files.channels("image_std", default.std),
        image_pixels=files.pixels(files.image, default.image_pixels),
        video_pixels=files.pixels(video if spec.processors.reads_video_size else {}, default.video_pixels),
        fps=float(video.get("fps") or default.fps),
        tile=tile,
        tiles=files.tiles(default.tiles) if tile else default.tiles,
        frames=(int(video.get("min_frames") or default.frames[0]), int(video.get("max_frames") or default.frames[1])),
    )


def _audio(default: AudioSpec, body: dict[str, Any], files: ProcessorFiles) -> AudioSpec:
    mels, sound = int(body.get("num_mel_bins", default.mels)), files.sound
    wanted = {"feature_size": mels, "sampling_rate": default.rate, "hop_length": default.hop, "n_fft": default.window}
    files.must_agree(wanted, "audio_config")
    padded = default.padded_seconds
    return replace(default, mels=mels, padded_seconds=float(sound.get("chunk_length", padded)) if padded else 0.0)


def _side(size: Any, token: int) -> int:
    """Return the side of a square image of whole tokens of so many pixels; raises ConfigError for other sizes."""
    side = _number(size)
    if side % token or size not in (side, [side, side]):
        msg = f"vision_config.image_size = {size} is no square of whole tokens, whose side is {token}"
        raise ConfigError(msg)
    return side


def _number(value: Any) -> int:
    """Return a size that a config may give for both sides."""
    return int(value[0] if isinstance(value, list | tuple) else value)


def token_ids(body: dict[str, Any], spec: FamilySpec, folder: Path) -> dict[str, int]:
    """Return a family's special token ids by role; raises ConfigError."""
    ids: dict[str, int] = {}
    for role in spec.tokens:
        keys = (f"{role}_token_id", f"{role}_token_index")
        value = next((body[key] for key in keys if isinstance(body.get(key), int)), None)
        if value is not None:
            ids[role] = int(value)
    missing = spec.tokens.keys() - ids.keys()
    if missing:
        known = _added_tokens(folder)
        ids |= {role: known[spec.tokens[role]] for role in missing if spec.tokens[role] in known}
    for role, text in spec.tokens.items():
        # Ends and starts stand in the text as they are; only placeholders and the starts of a span are looked for.
        if role not in ids and not role.startswith(("audio_", "vision_end")):
            msg = f"{folder / 'config.json'} has no {role}_token_id, and the tokenizer no {text}; add one"
            raise ConfigError(msg)
    return ids


def _added_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of a tokenizer's added tokens by their text."""
    tokens: dict[str, int] = {}
    try:
        if (path := folder / "tokenizer_config.json").exists():
            decoder = json.loads(path.read_text()).get("added_tokens_decoder", {})
            tokens |= {str(entry["content"]): int(key) for key, entry in decoder.items()}
        if not tokens and (path := folder / "tokenizer.json").exists():
            added = json.loads(path.read_text())["added_tokens"]
            tokens |= {str(entry["content"]): int(entry["id"]) for entry in added}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{path} is not the file of a tokenizer: {type(error).__name__} {error}"
        raise ConfigError(msg) from error
    return tokens
