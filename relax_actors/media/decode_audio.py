"""Sound of a file as one channel of samples."""

from __future__ import annotations

from typing import Any

import av
import numpy as np

from relax_actors.media.container import check_end, opened
from relax_actors.media.settings import AudioSettings
from relax_actors.media.source import Source

RATES = (1000, 384_000)
"""Sample rates of sounds that are read."""


def decode_audio(
    source: Source, settings: AudioSettings, part: tuple[float, float | None]
) -> tuple[np.ndarray, int] | None:
    """Return the samples of a part of a sound, [samples] float32 in -1..1, and their rate; None without a sound.

    Raises:
        RowError: it cannot be decoded or exceeds a limit.
    """
    with opened(source, "a sound") as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        rate = stream.codec_context.sample_rate
        if not RATES[0] <= rate <= RATES[1]:
            source.refuse(f"a sample rate of {rate} Hz is outside {RATES[0]} to {RATES[1]} Hz; convert the sound")
        samples = _decode(source, container, stream, rate, part)
        start = int(part[0] * rate)
        whole = samples.shape[1] / rate
        if part[1] is None and stream.duration is not None:
            check_end(source, whole, float(stream.duration * stream.time_base))
        samples = samples[:, start : None if part[1] is None else int(part[1] * rate)]
        if not samples.shape[1]:
            source.refuse(f"the part from {part[0]:g} s on has no sound: it lasts {whole:.1f} s")
        return _mono(source, samples, settings), rate


def _decode(source: Source, container: Any, stream: Any, rate: int, part: tuple[float, float | None]) -> np.ndarray:
    """Return [channels, samples] float32 up to the end of the part."""
    # Only the format of the samples changes here; FFmpeg's own mixing and resampling are not used.
    floats = av.AudioResampler(format="fltp")
    most = source.limits.max_seconds if part[1] is None else min(part[1], source.limits.max_seconds)
    kept: list[np.ndarray] = []
    count = 0
    for frame in container.decode(stream):
        source.check_time()
        for converted in floats.resample(frame):
            kept.append(converted.to_ndarray())
            count += kept[-1].shape[1]
        if part[1] is None:
            source.check_seconds(count / rate)
        if count / rate >= most + 1:
            break
    kept += [converted.to_ndarray() for converted in floats.resample(None)]
    if not kept:
        source.refuse("the sound has no samples")
    if len({piece.shape[0] for piece in kept}) > 1:
        source.refuse("the number of channels changes within the sound")
    return np.concatenate(kept, axis=1)


def _mono(source: Source, samples: np.ndarray, settings: AudioSettings) -> np.ndarray:
    if len(samples) == 1 or settings.mono == "first":
        return np.asarray(samples[0])
    if settings.mono == "refuse":
        source.refuse(f'the sound has {len(samples)} channels; mix them, or set audio.mono to "mean" or "first"')
    return np.asarray(samples.mean(axis=0, dtype=np.float32))
