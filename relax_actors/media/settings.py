"""Settings of the preprocessing, and limits that are checked before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Settings of images.

    Attributes:
        min_pixels: an image with fewer pixels is enlarged; None for the value of the model's processor.
        max_pixels: an image with more pixels is reduced; None for the value of the model's processor.
        multiple: both sides become multiples of this; 0 for the model's patch size times its merge size.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    multiple: int = 0


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """Settings of videos.

    Attributes:
        fps: frames to sample for each second; None for the value of the model's processor.
        min_frames: sample at least this many frames, if the video has them.
        max_frames: sample at most this many frames.
        min_pixels: enlarge smaller frames. Qwen3-VL counts all frames together here, the other models each frame.
        max_pixels: reduce larger frames.
        total_pixels: reduce frames if all of them together have more pixels.
        multiple: both sides become multiples of this; 0 for the model's patch size times its merge size.
        audio: read the sound of the video too.
    """

    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    multiple: int = 0
    audio: bool = False


@dataclass(frozen=True, slots=True)
class AudioSettings:
    """Settings of sounds, also those of videos.

    Attributes:
        sample_rate: reduce the sound to this rate first, e.g. 8000 for the bandwidth of a telephone; the features are
            those of the model's own rate. None for the model's rate.
        max_seconds: longest sound; None for the longest that the model's processor takes.
        truncate: cut a longer sound; otherwise it is refused.
        mono: how several channels become one: their mean, or the first one. "refuse" refuses them.
    """

    sample_rate: int | None = None
    max_seconds: float | None = None
    truncate: bool = False
    mono: Literal["mean", "first", "refuse"] = "mean"


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Settings for each kind of medium."""

    image: ImageSettings = field(default_factory=ImageSettings)
    video: VideoSettings = field(default_factory=VideoSettings)
    audio: AudioSettings = field(default_factory=AudioSettings)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a raw medium. What exceeds one is refused before it is decoded, wherever its header says so.

    Attributes:
        max_bytes: size of the file.
        max_pixels: pixels of an image or of one frame.
        max_frames: frames of a video, sampled or not.
        max_seconds: duration of a video or sound.
    """

    max_bytes: int = 256 << 20
    max_pixels: int = 50_000_000
    max_frames: int = 100_000
    max_seconds: float = 3600.0
