"""The section [media]: how images, videos and sounds of prompts are found, bounded and made into features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from relax_actors.config.sections import NonNegativeInt, PoolSection, Positive, PositiveFloat, Section

TOWERS = frozenset(
    ("vision_config", "audio_config", "thinker_config", "vision_tower", "mm_vision_tower", "speech_config")
)
"""Fields of a config.json that only models which see or hear have."""


def is_nested(body: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a multimodal model: a section for the decoder and one for each tower."""
    return not TOWERS.isdisjoint(body)


def is_multimodal(path: Path | None, architecture: dict[str, Any] | None) -> bool:
    """Whether a model sees or hears, by its config.json or its [model.architecture]; False if neither can be read."""
    body = architecture
    if path is not None:
        try:
            body = json.loads((path / "config.json").read_text())
        except (OSError, ValueError, RecursionError):  # reported where the model is used
            return False
    return isinstance(body, dict) and is_nested(body)


class ImageSection(Section):
    """[media.image]: size of images. Settings that are not set are those of the model's own processor."""

    min_pixels: Positive | None = None
    """An image with fewer pixels is enlarged."""
    max_pixels: Positive | None = None
    """An image with more pixels is reduced."""
    multiple: NonNegativeInt = 0
    """Both sides become multiples of this; 0 for the model's patch size times its merge size."""


class VideoSection(Section):
    """[media.video]: frames of videos and their size. By default as the model's own processor."""

    fps: PositiveFloat | None = None
    """Frames to sample for each second."""
    min_frames: Positive | None = None
    """Fewest frames to sample, if the video has them."""
    max_frames: Positive | None = None
    """Most frames to sample."""
    min_pixels: Positive | None = None
    """Smaller frames are enlarged. Qwen3-VL counts all frames together here, other models each frame."""
    max_pixels: Positive | None = None
    """Larger frames are reduced."""
    total_pixels: Positive | None = None
    """Frames are reduced if all of them together have more pixels."""
    multiple: NonNegativeInt = 0
    """Both sides become multiples of this; 0 for the model's patch size times its merge size."""
    audio: bool = False
    """Whether the sound of a video is used, by models that hear."""


class AudioSection(Section):
    """[media.audio]: length and channels of sounds, also of videos."""

    sample_rate: Positive | None = None
    """Reduce sounds to this rate before that of the model, e.g. 8000 for the bandwidth of a telephone."""
    max_seconds: PositiveFloat | None = None
    """Longest sound; by default the longest that the model's own processor takes."""
    truncate: bool = False
    """Whether a longer sound is cut; otherwise its row is quarantined."""
    mono: Literal["mean", "first", "refuse"] = "mean"
    """How several channels become one: their mean, or the first one. "refuse" quarantines the row."""


KINDS: dict[str, type[Section]] = {"image": ImageSection, "video": VideoSection, "audio": AudioSection}
"""Settings of each kind of media."""


class LimitsSection(Section):
    """[media.limits]: what a file may hold. A file beyond a limit quarantines its row before it is decoded."""

    max_bytes: Positive = 256 << 20
    """Size of the file."""
    max_pixels: Positive = 50_000_000
    """Pixels of an image or of a frame."""
    max_frames: Positive = 100_000
    """Frames of a video, sampled or not."""
    max_seconds: PositiveFloat = 3600.0
    """Duration of a video or sound."""


class UrlSection(Section):
    """[media.urls]: download of media. Each URL of the data must have a hash (`xxh3` or `sha256`)."""

    allow: bool = False
    """Whether URLs are downloaded at all; else their rows are quarantined."""
    hosts: tuple[str, ...] = ()
    """Hosts that may be asked, e.g. `["media.example.org"]`; all if empty."""
    private: bool = False
    """Whether loopback, private and link-local addresses may be asked."""
    timeout: PositiveFloat = 30.0
    """Seconds for a download."""
    max_bytes: Positive = 64 << 20
    """Largest download."""


class MediaSection(PoolSection):
    """[media]: images, videos and sounds of prompts, which a pool of its own prepares. Runs of models that see or hear
    have it, with these defaults if the file does not write it.
    """

    memory_limit_mib: Positive | None = 4096
    """Memory limit of an actor's process; a row that exceeds it fails. Unlimited if not set."""
    max_concurrent_rows: Positive = 4
    """Rows that an actor takes at once."""
    folders: tuple[Path, ...] = ()
    """Folders whose files may be used, beside the folder of the data file. Relative paths of the data are looked up in
    the folder of the data file."""
    image: ImageSection = ImageSection()
    video: VideoSection = VideoSection()
    audio: AudioSection = AudioSection()
    limits: LimitsSection = LimitsSection()
    urls: UrlSection = UrlSection()

    @model_validator(mode="after")
    def _ranges(self) -> MediaSection:
        for name, what in product(KINDS, ("pixels", "frames")):
            kind = getattr(self, name)
            least, most = (getattr(kind, f"{end}_{what}", None) for end in ("min", "max"))
            if least is not None and most is not None and least > most:
                msg = f"media.{name}.min_{what} = {least} is more than media.{name}.max_{what} = {most}"
                raise ValueError(msg)
        return self
