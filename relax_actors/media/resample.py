"""Change of the sample rate by torchaudio."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from relax_actors.torchaudio_extension import permit_import

permit_import()

import torchaudio  # noqa: E402

STEP = 25
"""Rates are rounded to a multiple of this: the filter grows with the terms of the reduced ratio of the two rates. That
of 44,101 Hz to 16 kHz would take 2.8 GB; the largest error, at 8 kHz, is 0.15 %."""


def resample(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    """Return samples [samples] float32 at another rate."""
    if rate == target:
        return samples
    rounded = max(round(rate / STEP), 1) * STEP
    return np.asarray(_resampler(rounded, target)(torch.from_numpy(samples)))


@lru_cache(maxsize=16)
def _resampler(rate: int, target: int) -> Any:
    return torchaudio.transforms.Resample(rate, target)
