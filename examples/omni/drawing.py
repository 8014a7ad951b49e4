"""Pictures of features: what the model sees and hears, as PNG files."""

from __future__ import annotations

import numpy as np

from relax_actors.media import VisionSpec

_WIDEST = 64  # frames of a video that are drawn


def frames_of(patches: np.ndarray, grid: np.ndarray, spec: VisionSpec) -> np.ndarray:
    """Put the patches of an image or a video together again: `[frames, height, width, 3] uint8`."""
    t, h, w = (int(size) for size in grid)
    temporal = patches.shape[1] // (3 * spec.patch**2)
    tokens = (t, h // spec.merge, w // spec.merge)
    cut = patches.reshape(*tokens, spec.merge, spec.merge, 3, temporal, spec.patch, spec.patch)
    return cut.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(t * temporal, h * spec.patch, w * spec.patch, 3)


def strip(frames: np.ndarray) -> bytes:
    """Draw frames side by side."""
    import cv2  # noqa: PLC0415 with the extra `media`

    row = np.concatenate([*frames[:_WIDEST]], axis=1)
    return bytes(cv2.imencode(".png", row[:, :, ::-1])[1])


def spectrogram(log_mel: np.ndarray) -> bytes:
    """Draw a log-mel spectrogram `[mels, frames]`, low tones at the bottom."""
    import cv2  # noqa: PLC0415 with the extra `media`

    low, high = float(log_mel.min()), float(log_mel.max())
    shades = ((log_mel[::-1] - low) * (255 / max(high - low, 1e-6))).astype(np.uint8)
    return bytes(cv2.imencode(".png", cv2.applyColorMap(shades, cv2.COLORMAP_VIRIDIS))[1])
