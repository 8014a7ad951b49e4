"""Pixel values of the vision towers from stored uint8 patches."""

from __future__ import annotations

import torch
from torch import Tensor

from relax_actors.media.families import VisionSpec


def tiles_of(values: Tensor, spec: VisionSpec) -> Tensor:
    """Return the pixels of tiles, `[tiles, 3, side, side]`, of what `pixel_values` returns for their patches."""
    merge, patch, side = spec.merge, spec.patch, spec.tile // (spec.patch * spec.merge)
    cut = values.view(-1, side, side, merge, merge, 3, patch, patch)
    return cut.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, spec.tile, spec.tile)


def pixel_values(patches: Tensor, spec: VisionSpec) -> Tensor:
    """Return normalised patches on their device, bit-equal to transformers' processor.

    Args:
        patches: `[patches, 3 * frames * patch * patch] uint8`, where an image has one frame a patch, and a video
            `spec.temporal`.
        spec: the patches of the model.

    Returns:
        `[patches, 3 * temporal * patch * patch] float32`.
    """
    values = patches.view(len(patches), len(spec.mean), -1, spec.patch**2).float()
    mean, std = (torch.tensor(part, device=patches.device)[:, None, None] * 255 for part in (spec.mean, spec.std))
    values = values.sub_(mean).div_(std)
    if values.shape[2] != spec.temporal:
        values = values.repeat_interleave(spec.temporal, 2)
    return values.reshape(len(patches), -1)
