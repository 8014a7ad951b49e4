"""Features of images and videos: resized frames, cut into uint8 patches."""

from __future__ import annotations

import numpy as np
import torch

from relax_actors.config.media import ImageSection, VideoSection
from relax_actors.media.decode_image import decode_image
from relax_actors.media.decode_video import decode_frames, read_timeline
from relax_actors.media.families import VisionSpec
from relax_actors.media.features import Features
from relax_actors.media.sizes import arrangement, frame_size, resized, sampled
from relax_actors.media.source import Source
from relax_actors.messages.media import IMAGE, VIDEO


def image_features(source: Source, spec: VisionSpec, settings: ImageSection) -> Features:
    """Return an image's features; raises RowError or SizeError."""
    image = decode_image(source)
    source.check_resized(*image_size(image, spec, settings))
    return features_of_image(image, spec, settings)


def _tiled(image: np.ndarray, spec: VisionSpec) -> np.ndarray:
    """Return the tiles of an image from left to right and top to bottom, then the whole, `[tiles, side, side, 3]`."""
    side, (rows, columns) = spec.tile, arrangement(image.shape[0], image.shape[1], spec)
    canvas = resize(image, (rows * side, columns * side), spec.resampling)
    cut = canvas.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)
    return cut if len(cut) == 1 else np.concatenate([cut, resize(image, (side, side), spec.resampling)[None]])


def features_of_image(image: np.ndarray, spec: VisionSpec, settings: ImageSection) -> Features:
    """Return the features of a decoded image, [height, width, 3] uint8."""
    frames = (
        _tiled(image, spec) if spec.tile else resize(image, image_size(image, spec, settings), spec.resampling)[None]
    )
    patches, grid = to_patches(frames, spec, temporal=1)
    return Features(IMAGE, patches, grid, width=image.shape[1], height=image.shape[0])


def image_size(image: np.ndarray, spec: VisionSpec, settings: ImageSection) -> tuple[int, int]:
    """Return height and width of a resized image; raises SizeError."""
    if spec.tile:
        rows, columns = arrangement(image.shape[0], image.shape[1], spec)
        return rows * spec.tile, columns * spec.tile
    low = spec.image_pixels[0] if settings.min_pixels is None else settings.min_pixels
    high = spec.image_pixels[1] if settings.max_pixels is None else settings.max_pixels
    return resized(image.shape[0], image.shape[1], settings.multiple or spec.factor, (low, high), spec.image_frames)


def video_features(
    source: Source, spec: VisionSpec, settings: VideoSection, part: tuple[float, float | None]
) -> Features:
    """Return a video part's features; raises RowError or SizeError."""
    timeline = read_timeline(source, part)
    total = len(timeline.times)
    indices = sampled(total, timeline.fps, spec, settings)
    chosen = timeline.at(indices)

    def scaled(frame: np.ndarray) -> np.ndarray:
        size = frame_size(frame.shape[0], frame.shape[1], len(indices), spec, settings)
        source.check_resized(*size)
        return resize(frame, size)

    clip = decode_frames(source, timeline, chosen, scaled)
    patches, grid = to_patches(clip.frames, spec, spec.temporal)
    return Features(
        VIDEO,
        patches,
        grid,
        seconds_per_grid=spec.temporal / (len(indices) / total * timeline.fps),
        timestamps=_averaged(timeline.seconds(chosen), spec.temporal),
        width=clip.width,
        height=clip.height,
        frames=len(indices),
        seconds=total / timeline.fps,
    )


def _averaged(seconds: np.ndarray, temporal: int) -> tuple[float, ...]:
    """Return the mean time of the first and the last frame of each temporal patch."""
    filled = [*seconds.tolist(), *[float(seconds[-1])] * (-len(seconds) % temporal)]
    return tuple((filled[i] + filled[i + temporal - 1]) / 2 for i in range(0, len(filled), temporal))


def resize(frame: np.ndarray, size: tuple[int, int], mode: str = "bicubic") -> np.ndarray:
    """Resize a frame [height, width, 3] uint8, bit-equal to torchvision's bicubic or bilinear."""
    if frame.shape[:2] == size:
        return frame
    # A view with the channels last takes the fast path of torch for uint8.
    pixels = torch.from_numpy(frame).permute(2, 0, 1)[None]
    scaled = torch.nn.functional.interpolate(pixels, size=size, mode=mode, antialias=True)
    return np.asarray(scaled[0].permute(1, 2, 0))


def to_patches(frames: np.ndarray, spec: VisionSpec, temporal: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut frames [frames, height, width, 3] into patches; the last frame is repeated.

    Returns:
        Patches [t * h * w, 3 * temporal * patch * patch] uint8, those of a token side by side; and [t, h, w] int32.
    """
    if missing := -len(frames) % temporal:
        frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
    patch, merge = spec.patch, spec.merge
    t, h, w = len(frames) // temporal, frames.shape[1] // patch, frames.shape[2] // patch
    cut = frames.reshape(t, temporal, h // merge, merge, patch, w // merge, merge, patch, 3)
    # t, row and column of the token, row and column in the token, channel, frame, row and column in the patch
    cut = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    patches = np.ascontiguousarray(cut).reshape(t * h * w, 3 * temporal * patch * patch)
    return patches, np.array([t, h, w], np.int32)
