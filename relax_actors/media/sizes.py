"""Sizes of resized images and frames, and which frames of a video are taken."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from relax_actors.config.media import VideoSection
from relax_actors.media.families import VisionSpec

LONGEST = 200
"""Largest ratio of the sides of an image."""


class SizeError(ValueError):
    """Reason why an image or a video has no size that the model takes."""


def resized(height: int, width: int, factor: int, pixels: tuple[int, int], frames: int = 1) -> tuple[int, int]:
    """Return the height and width, multiples of `factor`, to which an image is resized.

    Args:
        height: height of the image.
        width: width of the image.
        factor: side of a token in pixels, or a multiple of it.
        pixels: least and most pixels, of all frames together.
        frames: number of frames whose pixels are counted together; 1 for an image of most families.

    Raises:
        SizeError: the sides are too different.
    """
    stored = f"{width} x {height}"
    if frames > 1 and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > LONGEST:
        msg = f"{stored} pixels: one side is more than {LONGEST} times the other; crop it"
        raise SizeError(msg)
    low, high = pixels
    rows, columns = (round(side / factor) * factor for side in (height, width))
    # transformers rounds the number of frames here, and not in the scale.
    counted = max(round(frames / 2) * 2, 1) if frames > 1 else 1
    if counted * rows * columns > high:
        scale = math.sqrt(frames * height * width / high)
        rows, columns = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif counted * rows * columns < low:
        scale = math.sqrt(low / (frames * height * width))
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return rows, columns


def arrangement(height: int, width: int, spec: VisionSpec) -> tuple[int, int]:
    """Return the rows and columns of tiles whose shape is nearest to that of an image.

    Of equally near arrangements the larger one is taken, as long as it has less than twice the pixels of the image.
    """
    best, nearest = (1, 1), math.inf
    for columns, rows in _arrangements(*spec.tiles):
        distance = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * spec.tile**2 * columns * rows
        if distance < nearest or (distance == nearest and is_filled):
            best, nearest = (rows, columns), distance
    return best


@cache
def _arrangements(least: int, most: int) -> list[tuple[int, int]]:
    """Return the columns and rows of so many tiles, the smaller ones first."""
    counts = range(1, most + 1)
    return sorted(((c, r) for c in counts for r in counts if least <= c * r <= most), key=math.prod)


def frame_size(height: int, width: int, frames: int, spec: VisionSpec, settings: VideoSection) -> tuple[int, int]:
    """Return height and width of a video's resized frames; raises SizeError."""
    frames = max(frames, spec.temporal)
    factor = settings.multiple or spec.factor
    low = spec.video_pixels[0] if settings.min_pixels is None else settings.min_pixels
    frame, total = settings.max_pixels, settings.total_pixels
    if spec.whole_video:
        total = spec.video_pixels[1] if total is None else total
        if frame is not None:
            total = max(min(frame, total // frames), int(low * 1.05)) * frames
        return resized(height, width, factor, (low, total), frames)
    frame = spec.video_pixels[1] if frame is None else frame
    if total is not None:
        frame = max(min(frame, total // frames), int(low * 1.05))
    return resized(height, width, factor, (low, frame))


def sampled(total: int, fps: float, spec: VisionSpec, settings: VideoSection) -> np.ndarray:
    """Return the indices of the frames to take, [frames] int64, in order.

    Qwen3-VL spreads the frames from the first to the last one. The other models take an even number of frames in equal
    steps; where their rule gives no frames (a video of one frame), all frames are taken.
    """
    wanted = spec.fps if settings.fps is None else settings.fps
    low = spec.frames[0] if settings.min_frames is None else settings.min_frames
    high = spec.frames[1] if settings.max_frames is None else settings.max_frames
    if spec.whole_video:
        count = max(min(max(int(total / fps * wanted), low), high, total), 1)
        return np.linspace(0, total - 1, count).round().astype(np.int64)
    even = min(high, total) // spec.temporal * spec.temporal
    count = int(min(max(total / fps * wanted, low), even)) // spec.temporal * spec.temporal
    if count < 1:
        return np.arange(min(total, max(high, 1)))
    # transformers computes the steps in float32 too.
    steps = np.arange(count, dtype=np.float32) * np.float32(total / count)
    return np.minimum(steps.astype(np.int64), total - 1)
