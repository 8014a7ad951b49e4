"""Change of the sample rate by torchaudio."""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch

STEP = 25
"""Rates are rounded to a multiple of this: the filter grows with the terms of the reduced ratio of the two rates. That
of 44,101 Hz to 16 kHz would take 2.8 GB; the largest error, at 8 kHz, is 0.15 %."""
_EXTENSION = "torchaudio._extension"


def resample(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    """Return samples [samples] float32 at another rate."""
    if rate == target:
        return samples
    rounded = max(round(rate / STEP), 1) * STEP
    return np.asarray(_resampler(rounded, target)(torch.from_numpy(samples)))


@lru_cache(maxsize=16)
def _resampler(rate: int, target: int) -> Any:
    return import_torchaudio().transforms.Resample(rate, target)


def import_torchaudio() -> ModuleType:
    """Import torchaudio without its compiled extension.

    The wheel on PyPI is built for one version of CUDA, and its import fails beside a torch without CUDA or with another
    one. Resampling needs torch only, so the module that loads the extension is replaced by one that says there is none.
    """
    if "torchaudio" not in sys.modules:
        absent = ModuleType(_EXTENSION)
        absent.__dict__.update(_IS_TORCHAUDIO_EXT_AVAILABLE=False, fail_if_no_align=lambda function: function)
        sys.modules.setdefault(_EXTENSION, absent)
    return importlib.import_module("torchaudio")
