"""What the file of a model family declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from relax_actors.messages.media import AUDIO, IMAGE, VIDEO


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
        image_frames: frames that an image counts as for the bounds of its pixels.
        tile: side of a tile in pixels, where an image becomes tiles of one size; 0 if it is one grid of patches.
        tiles: least and most tiles of an image; with several tiles the whole image, resized to a tile, is added.
        resampling: how images are resized.
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
    image_frames: int = 1
    tile: int = 0
    tiles: tuple[int, int] = (1, 1)
    resampling: Literal["bilinear", "bicubic"] = "bicubic"

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
class PositionRule:
    """Rule of the rotary positions.

    Attributes:
        sections: how the rotary frequencies of time, row and column lie: one axis after the other, or alternating.
            "one axis" if all tokens count as text.
        times: gives the positions of the temporal patches of a video from their numbers `[t] float32`, the seconds of a
            patch and the positions a second; computed in float32, because truncation shows the rounding.
        scale: gives the positions a second of video from config.json.
        dtype: type of positions; float32 if frames lie between whole numbers.
        after_side: whether the token after an image or video follows its longer side, not its largest position.
        rounds: gives the round in which each token of a video or of its sound comes, from the positions of its time
            `[n]` and the positions of a chunk; in a round the video comes before the sound.
        start_step: positions between the two tokens that begin a video with its sound, and between those that end it.
    """

    sections: Literal["one axis", "consecutive", "interleaved"]
    times: Callable[[np.ndarray, np.float32, np.float32], np.ndarray] = lambda numbers, *_: numbers
    scale: Callable[[dict[str, Any]], float] = lambda _: 1.0
    dtype: str = "int32"
    after_side: bool = True
    rounds: Callable[[np.ndarray, int], np.ndarray] = lambda times, _: times
    start_step: int = 1


@dataclass(frozen=True, slots=True)
class Processors:
    """Classes in transformers that prepare media, as the files of a checkpoint name them.

    Attributes:
        whole: processor of prompts with media.
        image: processor of images; empty if the model does not see.
        video: processor of videos.
        reads_video_size: whether the processor of videos keeps to the sizes in its file.
    """

    whole: str
    image: str = ""
    video: str = ""
    reads_video_size: bool = True


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Text model of a family.

    Attributes:
        family: model type of a text model with the same layers, which Megatron-Core may lack.
        prefix: prefix of its weights in transformers.
        ignores_head_dim: whether transformers computes `head_dim` from the hidden size, whatever config.json says.
        is_open: whether `text_config.model_type` may name any text model.
        joins_images: whether every token of an image attends to all others of it, also to later ones.
    """

    family: Literal["qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "glm4", "gemma3_text"]
    prefix: str = "model.language_model."
    ignores_head_dim: bool = False
    is_open: bool = False
    joins_images: bool = False


@dataclass(frozen=True, slots=True)
class SglangSpec:
    """How SGLang serves a family.

    Attributes:
        architecture: name of SGLang's class, of which `engines.sglang.server_models` has a subclass; empty if none.
        prefixes: prefixes of weights in transformers, each with that in SGLang; the first that fits counts.
        vision_fields: fields of `vision_config` that SGLang reads, where config.json lacks them.
        decoders: values of `text_config.model_type` that the class takes, if the family leaves it open.
    """

    architecture: str = ""
    prefixes: tuple[tuple[str, str], ...] = ()
    vision_fields: Mapping[str, Any] = field(default_factory=dict)
    decoders: tuple[str, ...] = ()


TOWERS_FIRST = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", "towers."),
)
"""`SglangSpec.prefixes` of a model with the towers of transformers; see `server_models.tower_models`."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FamilySpec:
    """What holds for every model of a family.

    Attributes:
        model_type: in config.json; of omni models that of the thinker, the part that reads and writes text.
        whole: model type of an omni model that holds the thinker and a voice; empty for others.
        voice: prefixes of the weights that write speech, which are neither built nor trained.
        tokens: text of each special token of media in the tokenizers of the real models, by role; the kinds of media
            that the models take are among the roles.
        placeholder_field: field of config.json with the id of a placeholder.
        vision: preprocessing of images and videos where config.json and the processor files leave it open.
        audio: preprocessing of sounds, likewise.
        positions: rule of the rotary positions.
        timestamp: text of the `seconds` before each temporal patch of a video; empty if there is none.
        processors: classes in transformers that prepare media.
        vision_width: field of `vision_config` that must equal the decoder's hidden size.
        decoder: the text model.
        brackets: whether a prompt has one token for an image, around whose placeholders `vision_start` and `vision_end`
            are written with them.
        marks: role of the token that a prompt has for a medium, by its kind, where it is not the placeholder.
        around: text that is written before `vision_start` and after `vision_end` with them.
        absent: why a kind of media that the real models take is not supported, by kind.
        stored_prefixes: prefixes of weights in transformers, each with one that files of checkpoints have for it.
        sglang: how SGLang serves the family.
    """

    model_type: str
    tokens: Mapping[str, str]
    positions: PositionRule
    processors: Processors
    decoder: DecoderSpec
    vision: VisionSpec | None = None
    audio: AudioSpec | None = None
    whole: str = ""
    voice: tuple[str, ...] = ()
    placeholder_field: str = "{}_token_id"
    timestamp: str = ""
    vision_width: str = "out_hidden_size"
    brackets: bool = False
    marks: Mapping[str, str] = field(default_factory=dict)
    around: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)
    stored_prefixes: tuple[tuple[str, str], ...] = ()
    sglang: SglangSpec = SglangSpec()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of media that the models take."""
        return tuple(kind for kind in (IMAGE, VIDEO, AUDIO) if kind in self.tokens)
