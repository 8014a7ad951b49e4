"""Features of sounds."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch

from relax_actors.config.media import AudioSection
from relax_actors.media.decode_audio import decode_audio
from relax_actors.media.families import AudioSpec
from relax_actors.media.features import Features
from relax_actors.media.resample import resample
from relax_actors.media.source import Source
from relax_actors.messages.media import AUDIO

SILENCE = 16
"""Frames of silence after a sound; a frame sees the samples of 2.5."""
SHORTEST = 3
"""Frames that give at least one token in every model."""


def sound_features(
    source: Source,
    spec: AudioSpec,
    settings: AudioSection,
    part: tuple[float, float | None],
    *,
    inside: bool = False,
) -> Features | None:
    """Return the features of a part of a sound; None if the file has no sound.

    Raises:
        RowError: it cannot be decoded, exceeds a limit, or is too long or too short for the model.
    """
    decoded = decode_audio(source, settings, part, _longest(spec, settings))
    if decoded is None:
        return None
    samples, rate = decoded
    seconds = len(samples) / rate
    if settings.sample_rate is not None and rate > settings.sample_rate:
        samples, rate = resample(samples, rate, settings.sample_rate), settings.sample_rate
    samples = resample(samples, rate, spec.rate)
    if len(samples) < SHORTEST * spec.hop:
        source.refuse(f"{seconds * 1000:.0f} ms of sound are too short; the model needs {SHORTEST * 10} ms")
    array, frames = features_of_sound(samples, spec)
    grid = np.array([frames], np.int32)
    return Features(AUDIO, array, grid, inside=inside, seconds=seconds)


def _longest(spec: AudioSpec, settings: AudioSection) -> float:
    own = spec.padded_seconds or math.inf
    return own if settings.max_seconds is None else min(settings.max_seconds, own)


def features_of_sound(samples: np.ndarray, spec: AudioSpec) -> tuple[np.ndarray, int]:
    """Return the spectrogram of samples at the model's rate, and its number of valid frames.

    Its last frames see the silence with which the model's processor fills up a sound, if it does. A little silence
    gives the same bits as all of it: its other frames are equal.
    """
    whole = int(spec.padded_seconds * spec.rate) // spec.hop
    if not whole:
        return log_mel(samples, spec), len(samples) // spec.hop
    valid = -(-len(samples) // spec.hop)
    filled = np.zeros(min(valid + SILENCE, whole) * spec.hop, np.float32)
    filled[: len(samples)] = samples
    array = log_mel(filled, spec)
    if not spec.fixed:
        return np.ascontiguousarray(array[:, :valid]), valid
    rest = np.repeat(array[:, -1:], whole - array.shape[1], axis=1)
    return np.concatenate([array, rest], axis=1), valid


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
