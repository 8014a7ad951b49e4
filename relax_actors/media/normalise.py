"""Pixel values of the vision towers from stored uint8 patches."""

from __future__ import annotations

import numpy as np

from relax_actors.media.family import VisionSpec

CHANNELS = 3


def pixel_values(patches: np.ndarray, spec: VisionSpec) -> np.ndarray:
    """Return normalised patches, bit-equal to those of the model's processor in transformers.

    Args:
        patches: [patches, 3 * frames * patch * patch] uint8, where an image has one frame a patch, and a video
            `spec.temporal`.
        spec: the patches of the model.

    Returns:
        [patches, 3 * temporal * patch * patch] float32.
    """
    count, area = len(patches), spec.patch * spec.patch
    values = patches.reshape(count, CHANNELS, -1, area)
    scale = np.float32(255)
    mean, std = ((np.array(part, np.float32) * scale)[:, None, None] for part in (spec.mean, spec.std))
    normalised: np.ndarray = (values.astype(np.float32) - mean) / std
    if normalised.shape[2] != spec.temporal:
        normalised = np.repeat(normalised, spec.temporal, axis=2)
    return normalised.reshape(count, CHANNELS * spec.temporal * area)
