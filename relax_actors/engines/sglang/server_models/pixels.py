"""Pixel values from the uint8 patches of the store, on the server's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pixel_values(patches: Tensor, mean: Sequence[float], std: Sequence[float], frames: int, temporal: int) -> Tensor:
    """Return normalised patches, bit-equal to `media.normalise.pixel_values`.

    Args:
        patches: `[patches, channels * frames * patch * patch] uint8`.
        mean: mean of each channel, of values between 0 and 1.
        std: standard deviation of each channel.
        frames: frames of a stored patch.
        temporal: frames of a patch that the tower reads: the stored ones, or the only one so many times.

    Returns:
        `[patches, channels * temporal * patch * patch] float32`.
    """
    values = patches.view(len(patches), len(mean), frames, -1).float()
    shift, scale = (torch.tensor(part, device=patches.device)[:, None, None] * 255 for part in (mean, std))
    values = (values - shift) / scale
    if frames != temporal:
        values = values.repeat_interleave(temporal, 2)
    return values.reshape(len(patches), -1)
