"""Families of multimodal models, read from the files of a model folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from relax_actors.config.media import TOWERS
from relax_actors.errors import ConfigError
from relax_actors.media.processor_files import ProcessorFiles, read_processor_files
from relax_actors.media.special_tokens import token_ids

Rope = Literal["none", "vl", "qwen2_5_omni", "qwen3_omni"]


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """How images and frames become patches.

    Attributes:
        patch: side of a patch in pixels.
        merge: patches a side that become one token.
        temporal: frames of a patch.
        mean: mean of each channel, of values between 0 and 1.
        std: standard deviation of each channel.
        image_pixels: least and most pixels of an image by default.
        video_pixels: least pixels of a video, and most pixels of a frame or of the whole video, by default.
        whole_video: whether the pixels of a video are counted over all of its frames.
        fps: frames sampled for each second by default.
        frames: least and most sampled frames by default.
    """

    patch: int
    merge: int
    temporal: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_pixels: tuple[int, int]
    video_pixels: tuple[int, int]
    whole_video: bool
    fps: float = 2.0
    frames: tuple[int, int] = (4, 768)

    @property
    def factor(self) -> int:
        """Side of a token in pixels."""
        return self.patch * self.merge


@dataclass(frozen=True, slots=True)
class AudioSpec:
    """How a sound becomes a log-mel spectrogram and tokens.

    Attributes:
        mels: bins of the spectrogram.
        chunk: frames of a block of the encoder that gives 13 tokens; 0 if 4 frames give a token.
        padded_seconds: length to which the model's processor pads a sound; 0 if it does not.
        fixed: whether the encoder needs the padding, too.
        rate: samples a second.
        window: samples of a Fourier transform.
        hop: samples between two frames.
    """

    mels: int
    chunk: int = 0
    padded_seconds: float = 0.0
    fixed: bool = False
    rate: int = 16_000
    window: int = 400
    hop: int = 160

    def tokens(self, frames: int) -> int:
        """Return the number of placeholder tokens of a spectrogram."""
        if not self.chunk:
            return ((frames - 1) // 2 + 1 - 2) // 2 + 1
        blocks, rest = divmod(frames, self.chunk)
        for _ in range(3):
            rest = (rest - 1) // 2 + 1
        return rest + 13 * blocks


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a multimodal model that its preprocessing needs.

    Attributes:
        model_type: model type in config.json, of the thinker for omni models.
        rope: rule of the rotary positions.
        ids: token ids by name: image, video, audio, vision_start, vision_end, audio_start, audio_end.
        vision: preprocessing of images and videos, if the model takes them.
        audio: preprocessing of sounds, if the model takes them.
        seconds_scale: rotary positions a second of video.
        chunk_seconds: seconds of video that come before the sound of the same seconds (Qwen2.5-Omni).
        timestamps: whether each temporal patch of a video follows its time as text (Qwen3-VL).
        barred: ids that a response never contains.
    """

    model_type: str
    rope: Rope
    ids: dict[str, int] = field(hash=False)
    vision: VisionSpec | None
    audio: AudioSpec | None
    seconds_scale: float = 1.0
    chunk_seconds: float = 2.0
    timestamps: bool = False
    barred: tuple[int, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of media that the model takes."""
        return (("image", "video") if self.vision else ()) + (("audio",) if self.audio else ())

    @property
    def image_id(self) -> int | None:
        """Placeholder of an image."""
        return self.ids.get("image")

    @property
    def video_id(self) -> int | None:
        """Placeholder of a video."""
        return self.ids.get("video")

    @property
    def audio_id(self) -> int | None:
        """Placeholder of a sound."""
        return self.ids.get("audio")

    def token(self, kind: str) -> int:
        """Return the placeholder of a kind of media."""
        return self.ids[kind]

    def marker(self, kind: str, tokenizer: Tokenizer) -> str:
        """Return the text of one medium in a prompt that no chat template has written."""
        span = "audio" if kind == "audio" else "vision"
        ids = (self.ids.get(f"{span}_start"), self.ids[kind], self.ids.get(f"{span}_end"))
        return "".join(tokenizer.id_to_token(token) or "" for token in ids if token is not None)

    @property
    def position_dtype(self) -> str:
        """Type of rotary positions: those of Qwen3-Omni have fractions within a video."""
        return "float32" if self.rope == "qwen3_omni" else "int32"


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the config of a model type does not say."""

    rope: Rope
    pixels: tuple[int, int] = (56 * 56, 28 * 28 * 1280)
    video_pixels: tuple[int, int] = (128 * 28 * 28, 768 * 28 * 28)
    whole_video: bool = False
    timestamps: bool = False
    clip: bool = True
    needs: tuple[str, ...] = ("image", "video", "vision_start", "vision_end")
    padded: bool = False
    fixed: bool = False


_OMNI = ("image", "video", "audio", "vision_start", "vision_end", "audio_start", "audio_end")
_QWEN3 = _Kind("vl", (65_536, 16_777_216), (4096, 25_165_824), whole_video=True, timestamps=True, clip=False)
KINDS = {
    "qwen2_vl": _Kind("vl"),
    "qwen2_5_vl": _Kind("vl"),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen2_5_omni_thinker": _Kind("qwen2_5_omni", needs=_OMNI, padded=True),
    "qwen3_omni_moe_thinker": _Kind(
        "qwen3_omni", (3136, 12_845_056), (128 * 32 * 32, 768 * 32 * 32), clip=False, needs=_OMNI
    ),
    "qwen2_audio": _Kind("none", needs=("audio", "audio_start", "audio_end"), padded=True, fixed=True),
}
_WHOLE = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def family_of(folder: Path) -> Family | None:
    """Return the family of a model folder; None for a text model.

    Raises:
        ConfigError: the model takes media that are not supported, or its files contradict each other.
    """
    path = folder / "config.json"
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ConfigError(msg) from error
    if not isinstance(body, dict):
        return None
    return family_of_body(body, str(path), folder)


def family_of_body(body: dict[str, Any], where: str, folder: Path | None = None) -> Family | None:
    """Return the family of a model's config; None for a text model.

    Args:
        body: content of config.json.
        where: its origin, for errors.
        folder: model folder with the files of tokenizer and processors; None if there is none yet.

    Raises:
        ConfigError: as `family_of`.
    """
    model_type = str(body.get("model_type"))
    if TOWERS.isdisjoint(body) and model_type not in {*KINDS, *_WHOLE}:
        return None
    if model_type in _WHOLE and isinstance(body.get("thinker_config"), dict):
        body, model_type = body["thinker_config"], _WHOLE[model_type]
    kind = KINDS.get(model_type)
    if kind is None:
        supported = ", ".join(sorted({*KINDS, *_WHOLE}))
        msg = f"{where}: multimodal models of type {model_type!r} are not supported; choose one of: {supported}"
        raise ConfigError(msg)
    files = ProcessorFiles(where) if folder is None else read_processor_files(folder)
    try:
        return _family(model_type, kind, body, files, token_ids(body, kind.needs, where, folder))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"{where} is not the config of a {model_type} model: {type(error).__name__} {error}"
        raise ConfigError(msg) from error


def _family(model_type: str, kind: _Kind, body: dict[str, Any], files: ProcessorFiles, ids: dict[str, int]) -> Family:
    vision = _vision(kind, body["vision_config"], files) if "image" in kind.needs else None
    audio = _audio(kind, body["audio_config"], files) if "audio" in kind.needs else None
    scale = float(body.get("position_id_per_seconds", 25))
    if model_type == "qwen2_5_vl":
        scale = float(body["vision_config"].get("tokens_per_second", 4))
    return Family(
        model_type=model_type,
        rope=kind.rope,
        ids=ids,
        vision=vision,
        audio=audio,
        seconds_scale=1.0 if kind.timestamps or model_type == "qwen2_vl" else scale,
        chunk_seconds=float(body.get("seconds_per_chunk", 2)),
        timestamps=kind.timestamps,
        barred=tuple(sorted(set(ids.values()))),
    )


def _vision(kind: _Kind, body: dict[str, Any], files: ProcessorFiles) -> VisionSpec:
    default = 14 if kind.clip else 16
    sizes = {
        "patch_size": _number(body.get("patch_size", default)),
        "merge_size": _number(body.get("spatial_merge_size", 2)),
        "temporal_patch_size": _number(body.get("temporal_patch_size", 2)),
    }
    files.must_agree(sizes)
    if _number(body.get("in_channels", body.get("in_chans", 3))) != 3:  # noqa: PLR2004 red, green, blue
        msg = "vision_config.in_channels must be 3"
        raise ConfigError(msg)
    mean, std = _CLIP if kind.clip else _HALF
    image, video = files.image, files.video
    return VisionSpec(
        patch=sizes["patch_size"],
        merge=sizes["merge_size"],
        temporal=sizes["temporal_patch_size"],
        mean=files.channels("image_mean", mean),
        std=files.channels("image_std", std),
        image_pixels=files.pixels(image, kind.pixels),
        # The processors of omni models ignore the sizes in their files for videos.
        video_pixels=files.pixels(video if kind.rope == "vl" else {}, kind.video_pixels),
        whole_video=kind.whole_video,
        fps=float(video.get("fps") or 2.0),
        frames=(int(video.get("min_frames") or 4), int(video.get("max_frames") or 768)),
    )


def _audio(kind: _Kind, body: dict[str, Any], files: ProcessorFiles) -> AudioSpec:
    mels = int(body.get("num_mel_bins", 128))
    found = files.sound
    wanted = {"feature_size": mels, "sampling_rate": 16_000, "hop_length": 160, "n_fft": 400}
    files.must_agree_sound(wanted)
    seconds = float(found.get("chunk_length", 30)) if kind.padded else 0.0
    chunk = 2 * int(body.get("n_window", 50)) if kind.rope == "qwen3_omni" else 0
    return AudioSpec(mels=mels, chunk=chunk, padded_seconds=seconds, fixed=kind.fixed)


def _number(value: Any) -> int:
    """Return a size that a config may give for both sides."""
    return int(value[0] if isinstance(value, list | tuple) else value)
