"""Features of a medium: uint8 patches, or the log-mel spectrogram of a sound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relax_actors.messages.media import AUDIO

VERSION = 1
"""Raised with every change that gives other features for the same file and settings."""


@dataclass(frozen=True, slots=True)
class Features:
    """Features of one medium.

    Attributes:
        kind: one of `KINDS_OF_MEDIA`.
        array: patches [t * h * w, 3 * frames * patch * patch] uint8 with 1 frame a patch for images; or log-mel
            [mels, frames] float32.
        grid: [t, h, w] int32 patches; of a sound [valid frames] int32.
        seconds_per_grid: seconds of a temporal patch of a video; 0 for other kinds.
        timestamps: seconds of the first and last frame of each temporal patch, averaged; of videos.
        inside: whether it is the sound of the video before it.
        width: pixels of the raw image or frame.
        height: pixels of the raw image or frame.
        frames: sampled frames of a video.
        seconds: duration of the raw video or sound.
    """

    kind: str
    array: np.ndarray
    grid: np.ndarray
    seconds_per_grid: float = 0.0
    timestamps: tuple[float, ...] = ()
    inside: bool = False
    width: int = 0
    height: int = 0
    frames: int = 0
    seconds: float = 0.0

    @property
    def visual(self) -> bool:
        """Whether it is an image or a video."""
        return self.kind != AUDIO
