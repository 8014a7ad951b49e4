"""Sound of a file as one channel of samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import av
import numpy as np

from relax_actors.config.media import AudioSection
from relax_actors.media.container import check_end, decoder_of, opened
from relax_actors.media.source import Source

RATES = (1000, 384_000)
"""Sample rates of sounds that are read."""


def decode_audio(
    source: Source, settings: AudioSection, part: tuple[float, float | None], longest: float = math.inf
) -> tuple[np.ndarray, int] | None:
    """Return a part of a sound, [samples] float32 in -1..1, and its rate; or None.

    Raises:
        RowError: it cannot be decoded, exceeds a limit, or is longer than `longest` seconds.
    """
    with opened(source, "a sound") as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        rate = decoder_of(source, stream).sample_rate
        if not RATES[0] <= rate <= RATES[1]:
            source.refuse(f"a sample rate of {rate} Hz is outside {RATES[0]} to {RATES[1]} Hz; convert the sound")
        start, end = part
        if end is None and settings.truncate and longest < math.inf:
            end = start + longest
        known = None if stream.duration is None else float(stream.duration * stream.time_base)
        if end is None and known is not None:
            _check_longest(source, known - start, longest)
        last = min(math.inf if end is None else end, source.limits.max_seconds)
        samples = _decode(source, container, stream, settings, last)
        if end is None and known is not None:
            check_end(source, len(samples) / rate, known)
        taken = samples[int(start * rate) : None if end is None else int(end * rate)]
        if not len(taken):
            source.refuse(f"the part from {start:g} s on has no sound: it lasts {len(samples) / rate:.1f} s")
        if not settings.truncate:
            _check_longest(source, len(taken) / rate, longest)
        return taken[: int(min(longest * rate, len(taken)))], rate


def _check_longest(source: Source, seconds: float, longest: float) -> None:
    if seconds > longest:
        source.refuse(f"{seconds:.1f} s of sound exceed audio.max_seconds = {longest:g}; cut it, or set audio.truncate")


def _decode(source: Source, container: Any, stream: Any, settings: AudioSection, seconds: float) -> np.ndarray:
    """Return one channel of the first seconds, `[samples] float32`; raises RowError."""
    # Only the format of the samples changes here; FFmpeg's own mixing and resampling are not used.
    floats = av.AudioResampler(format="fltp")
    stream.codec_context.thread_count = 1
    rate, count, channels = stream.codec_context.sample_rate, 0, set()
    kept: list[np.ndarray] = []
    for frame in _frames(container, stream):
        source.check_time()
        for converted in floats.resample(frame):
            piece = converted.to_ndarray()
            channels.add(len(piece))
            count += piece.shape[1]
            kept.append(_mono(source, piece, settings))
        if count / rate >= seconds + 1:
            source.check_seconds(seconds if seconds < source.limits.max_seconds else count / rate)
            break
    if not count:
        source.refuse("the sound has no samples")
    if len(channels) > 1:
        source.refuse("the number of channels changes within the sound")
    return np.concatenate(kept)


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Give the frames of a sound, then None, with which a resampler gives what it holds."""
    yield from container.decode(stream)
    yield None


def _mono(source: Source, samples: np.ndarray, settings: AudioSection) -> np.ndarray:
    if len(samples) == 1 or settings.mono == "first":
        return np.asarray(samples[0])
    if settings.mono == "refuse":
        source.refuse(f'the sound has {len(samples)} channels; mix them, or set audio.mono to "mean" or "first"')
    return np.asarray(samples.mean(axis=0, dtype=np.float32))
