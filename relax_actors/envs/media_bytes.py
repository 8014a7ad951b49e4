"""Arrays of pictures and sounds from environments, as bytes of PNG and WAV files."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.data.media_fields import PART_TYPES
from relax_actors.messages.media import AUDIO, IMAGE

_CHANNELS = {1: 0, 3: 2}
"""Colour types of PNG by the number of channels."""
_FASTEST = 1


def with_bytes(part: dict[str, Any]) -> dict[str, Any]:
    """Return a content part with a file's bytes in place of an array; raises ValueError."""
    arrays = [name for name, value in part.items() if isinstance(value, np.ndarray)]
    if not arrays:
        return part
    kind, (name, *more) = PART_TYPES.get(part.get("type", "")), arrays
    if kind not in (IMAGE, AUDIO) or more:
        msg = f"an array in a part of type {part.get('type')!r:.40}; give images and sounds as arrays, videos as files"
        raise ValueError(msg)
    rest = {key: value for key, value in part.items() if key != name}
    if kind == IMAGE:
        return {**rest, "bytes": png_of(part[name])}
    return {**rest, "bytes": wav_of(part[name], rest.pop("sampling_rate", None))}


def png_of(pixels: NDArray[Any]) -> bytes:
    """Return a picture, `[height, width(, 3)] uint8`, as PNG; equal pixels give equal bytes.

    Raises:
        ValueError: the array has another shape or type.
    """
    whole = pixels[:, :, None] if pixels.ndim == 2 else pixels  # noqa: PLR2004
    if whole.ndim != 3 or whole.shape[2] not in _CHANNELS or whole.dtype != np.uint8 or not whole.size:  # noqa: PLR2004
        msg = f"a picture of {pixels.dtype}{list(pixels.shape)}; give [height, width] or [height, width, 3] uint8"
        raise ValueError(msg)
    height, width, channels = whole.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), whole.reshape(height, -1)], axis=1)  # no filter
    head = struct.pack(">IIBBBBB", width, height, 8, _CHANNELS[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), _FASTEST)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def wav_of(samples: NDArray[Any], rate: Any) -> bytes:
    """Return a sound, `[samples]` int16 or floats from -1 to 1, as a WAV file of 16 bits.

    Raises:
        ValueError: the array has another shape or type, or there is no rate.
    """
    if samples.ndim != 1 or not samples.size or not (samples.dtype == np.int16 or samples.dtype.kind == "f"):
        msg = f"a sound of {samples.dtype}{list(samples.shape)}; give [samples] int16, or floats from -1 to 1"
        raise ValueError(msg)
    if not isinstance(rate, int) or rate < 1:
        msg = "a sound as an array without sampling_rate; give it in the same part"
        raise ValueError(msg)
    if samples.dtype.kind == "f":
        samples = (np.clip(np.nan_to_num(samples), -1, 1) * np.iinfo(np.int16).max).astype(np.int16)
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return target.getvalue()
