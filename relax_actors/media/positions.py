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
        [3, tokens]: time, row and column, of type `Family.position_dtype`.
    """
    rule, merge = family.spec.positions, family.vision.merge if family.vision is not None else 1
    t, h, w = int(grid[0]), int(grid[1]) // merge, int(grid[2]) // merge
    times = np.arange(t, dtype=np.float32)
    if seconds is not None:
        times = rule.times(times, np.float32(seconds), np.float32(family.seconds_scale))
    shape = (t, h, w)
    parts = (times[:, None, None], np.arange(h)[None, :, None], np.arange(w)[None, None, :])
    return np.stack([np.broadcast_to(part, shape).reshape(-1) for part in parts]).astype(rule.dtype)


def interleaved(grid: np.ndarray, sound: int, family: Family, seconds: float) -> tuple[np.ndarray, int]:
    """Return the order of the tokens of a video and its sound.

    Args:
        grid: [t, h, w] patches of the video.
        sound: tokens of the sound.
        family: the model.
        seconds: seconds of a temporal patch.

    Returns:
        [video + sound] int64 indices into the tokens of the video followed by those of the sound, and the number of
        tokens of one kind in the last round.
    """
    merge = family.vision.merge if family.vision is not None else 1
    each = int(grid[1]) // merge * (int(grid[2]) // merge)
    video = np.repeat(np.arange(int(grid[0])), each) * seconds * family.seconds_scale
    step = int(family.seconds_scale * family.chunk_seconds)
    both = (video, np.arange(sound, dtype=np.float64))
    rounds = np.concatenate([family.spec.positions.rounds(times, step) for times in both])
    heard = np.arange(len(rounds)) >= len(video)
    order = np.lexsort((heard, rounds))
    last = (rounds == rounds[order[-1]]) & (heard == heard[order[-1]])
    return order, int(np.count_nonzero(last))
