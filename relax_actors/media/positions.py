"""Multimodal rotary positions of one medium, as the models in transformers compute them."""

from __future__ import annotations

import numpy as np

from relax_actors.media.family import Family


def vision_positions(grid: np.ndarray, family: Family, seconds: float | None) -> np.ndarray:
    """Return the positions of an image or video, which begins at 0.

    Args:
        grid: [t, h, w] patches.
        family: the model.
        seconds: seconds of a temporal patch of a video; None for an image.

    Returns:
        [3, tokens]: time, row and column; float32 for Qwen3-Omni, int64 otherwise.
    """
    merge = family.vision.merge if family.vision is not None else 1
    t, h, w = int(grid[0]), int(grid[1]) // merge, int(grid[2]) // merge
    times = _times(t, family, seconds)
    shape = (t, h, w)
    parts = (times[:, None, None], np.arange(h)[None, :, None], np.arange(w)[None, None, :])
    return np.stack([np.broadcast_to(part, shape).reshape(-1) for part in parts]).astype(times.dtype)


def _times(count: int, family: Family, seconds: float | None) -> np.ndarray:
    """Return the position of each temporal patch; computed in float32, because truncation shows the rounding."""
    index = np.arange(count, dtype=np.float32)
    if seconds is None or family.timestamps or family.model_type == "qwen2_vl":
        scaled = index
    elif family.rope == "vl":
        scaled = index * (np.float32(family.seconds_scale) * np.float32(seconds))
    else:
        scaled = index * np.float32(seconds) * np.float32(family.seconds_scale)
    return scaled if family.rope == "qwen3_omni" else scaled.astype(np.int64)


def interleaved(grid: np.ndarray, sound: int, family: Family, seconds: float) -> tuple[np.ndarray, list[int]]:
    """Return the order of the tokens of a video and its sound.

    Args:
        grid: [t, h, w] patches of the video.
        sound: tokens of the sound.
        family: the model.
        seconds: seconds of a temporal patch.

    Returns:
        [video + sound] int64 indices into the tokens of the video followed by those of the sound, and the number of
        tokens of each piece of either.
    """
    merge = family.vision.merge if family.vision is not None else 1
    each = int(grid[1]) // merge * (int(grid[2]) // merge)
    video = np.repeat(np.arange(int(grid[0])), each) * seconds * family.seconds_scale
    audio = np.arange(sound, dtype=np.float64)
    if family.rope == "qwen3_omni":
        # A token of the video comes before one of the sound at the same time. What remains of either comes last.
        key = np.concatenate([video, audio])
        order = np.lexsort((np.arange(len(key)) >= len(video), key))
    else:
        step = int(family.seconds_scale * family.chunk_seconds)
        chunk = np.concatenate([_chunks(video, step), _chunks(audio, step)])
        order = np.lexsort((np.arange(len(chunk)) >= len(video), chunk))
        keys = chunk[order] * 2 + (order >= len(video))
        edges = np.flatnonzero(np.diff(keys)) + 1
        return order, [len(piece) for piece in np.split(order, edges)]
    edges = np.flatnonzero(np.diff(order >= len(video))) + 1
    pieces = [len(piece) for piece in np.split(order, edges)]
    return order, pieces


def _chunks(times: np.ndarray, step: int) -> np.ndarray:
    """Return the chunk of each token; a token opens at most one chunk, however late it is."""
    found, chunk = np.zeros(len(times), np.int64), 0
    for index, time in enumerate(times):
        if time >= (chunk + 1) * step:
            chunk += 1
        found[index] = chunk
    return found
