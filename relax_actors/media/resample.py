"""Change of the sample rate by a windowed sinc filter."""

from __future__ import annotations

import math

import numpy as np

CROSSINGS = 6
"""Zero crossings of the sinc on either side, as torchaudio has by default."""
ROLLOFF = 0.99
"""Cut-off frequency as a part of the lower Nyquist frequency."""
BLOCK = 1 << 16
"""Samples computed at once, which bounds memory."""


def resample(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    """Return samples [samples] float32 at another rate, by the filter of torchaudio's resample.

    The same filter as one table of taps for each phase: any pair of rates needs little memory, and neither torchaudio
    nor its compiled library, which PyPI has for CUDA only.
    """
    if rate == target:
        return samples
    divisor = math.gcd(rate, target)
    old, new = rate // divisor, target // divisor
    base = min(old, new) * ROLLOFF
    width = math.ceil(CROSSINGS * old / base)
    taps = _taps(old, new, base, width)
    count = math.ceil(new * len(samples) / old)
    padded = np.concatenate([np.zeros(width, np.float32), samples, np.zeros(width + 2, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps.shape[1])
    found = np.empty(count, np.float32)
    for start in range(0, count, BLOCK):
        index = np.arange(start, min(start + BLOCK, count))
        place, phase = np.divmod(index * old, new)
        found[start : start + BLOCK] = np.einsum("nt,nt->n", windows[place], taps[phase])
    return found


def _taps(old: int, new: int, base: float, width: int) -> np.ndarray:
    """Return the filter of each phase, [new, 2 * width + 2] float32."""
    offset = np.arange(-width, width + 2)[None, :] / old
    # Phases are indexed by their remainder, so that phase r is r / new of a sample after the sample at its place.
    phase = (np.arange(new) / new / old)[:, None]
    time = np.clip((offset - phase) * base, -CROSSINGS, CROSSINGS)
    window = np.cos(time * math.pi / CROSSINGS / 2) ** 2
    return np.asarray(np.sinc(time) * window * base / old, np.float32)
