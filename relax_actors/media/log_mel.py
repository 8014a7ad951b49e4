"""Whisper's log-mel spectrogram."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from relax_actors.media.families import AudioSpec

LINEAR_HZ, LINEAR_MELS = 1000.0, 15.0
"""Below this frequency mels are proportional to it."""
STEP = 27 / np.log(6.4)
"""Mels of a factor e above that frequency."""


def log_mel(samples: np.ndarray, spec: AudioSpec) -> np.ndarray:
    """Return the spectrogram of samples at the model's rate, [mels, samples // hop] float32."""
    sound = torch.from_numpy(samples)
    window = torch.hann_window(spec.window)
    spectrum = torch.stft(sound, spec.window, spec.hop, window=window, return_complex=True)
    power = (spectrum[..., :-1].abs() ** 2).contiguous()
    mel = torch.from_numpy(filters(spec.mels, spec.window, spec.rate)).T @ power
    scaled = mel.clamp(min=1e-10).log10()
    return np.asarray((torch.maximum(scaled, scaled.max() - 8.0) + 4.0) / 4.0)


@cache
def filters(mels: int, window: int, rate: int) -> np.ndarray:
    """Return Slaney's triangular filters of equal area, [window // 2 + 1, mels] float32."""
    ends = _mels(np.array([0.0, rate / 2]))
    places = _hertz(np.linspace(ends[0], ends[1], mels + 2))
    frequency = np.linspace(0, rate // 2, window // 2 + 1)
    width = np.diff(places)
    distance = places[None, :] - frequency[:, None]
    falling, rising = -distance[:, :-2] / width[:-1], distance[:, 2:] / width[1:]
    triangles = np.maximum(0, np.minimum(falling, rising))
    return np.asarray(triangles * (2.0 / (places[2:] - places[:-2]))[None, :], np.float32)


def _mels(hertz: np.ndarray) -> np.ndarray:
    above = LINEAR_MELS + np.log(np.maximum(hertz, LINEAR_HZ) / LINEAR_HZ) * STEP
    return np.where(hertz < LINEAR_HZ, 3.0 * hertz / 200.0, above)


def _hertz(mels: np.ndarray) -> np.ndarray:
    above = LINEAR_HZ * np.exp((mels - LINEAR_MELS) / STEP)
    return np.where(mels < LINEAR_MELS, 200.0 * mels / 3.0, above)
