"""Decoded media for reward functions, as the model's preprocessing decodes them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from relax_actors.config.media import AudioSection, LimitsSection
from relax_actors.media.source import read_source

LIMITS = LimitsSection()


def load_image(path: Path | str) -> np.ndarray:
    """Return an image, `[height, width, 3] uint8`: `load_image(prompt.media[0].path)`.

    Raises:
        RowError: it cannot be decoded or exceeds the default limits.
    """
    from relax_actors.media.decode_image import decode_image  # noqa: PLC0415 loads OpenCV

    return decode_image(read_source(Path(path), "", LIMITS, math.inf))


def load_frames(path: Path | str, count: int = 8) -> np.ndarray:
    """Return evenly spaced frames of a video, `[count, height, width, 3] uint8` in RGB.

    Raises:
        RowError: it has no frames, cannot be decoded or exceeds the default limits.
    """
    from relax_actors.media.decode_video import decode_frames, read_timeline  # noqa: PLC0415 loads PyAV

    source = read_source(Path(path), "", LIMITS, math.inf)
    timeline = read_timeline(source, (0.0, None))
    wanted = np.linspace(0, len(timeline.times) - 1, count).round().astype(int)
    return decode_frames(source, timeline, timeline.at(wanted), lambda frame: frame).frames


def load_sound(path: Path | str, rate: int = 16_000) -> np.ndarray:
    """Return the sound of a file, also of a video, `[samples] float32` from -1 to 1.

    Args:
        path: the file.
        rate: samples a second to return.

    Raises:
        RowError: it has no sound, cannot be decoded or exceeds the default limits.
    """
    from relax_actors.media.decode_audio import decode_audio  # noqa: PLC0415 loads PyAV
    from relax_actors.media.resample import resample  # noqa: PLC0415 loads torchaudio

    source = read_source(Path(path), "", LIMITS, math.inf)
    decoded = decode_audio(source, AudioSection(), (0.0, None))
    if decoded is None:
        source.refuse("the file has no sound")
    samples, own = decoded
    return resample(samples, own, rate)
