"""Containers of videos and sounds, opened by PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import av.error

from relax_actors.media.headers import container_of, image_header, unread_image
from relax_actors.media.source import Source

_HEAD = 1024
LATE, LATE_SECONDS = 0.02, 0.25
"""What may be missing at the end of a file: a part of its length, and seconds."""
_FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, UnicodeError)
"""What PyAV and the arithmetic on its numbers raise for fields that a damaged file lacks or has out of range."""
_RIFF, _STREAMED = b"RIFF", (0, 0xFFFFFFFF)
"""First bytes of AVI and WAV, and their sizes in a file that was written to a pipe."""


@contextmanager
def opened(source: Source, kind: str) -> Iterator[Any]:
    """Open a container; errors of FFmpeg within become those of the row.

    Its format follows from its first bytes, so that a playlist or script cannot make FFmpeg open other files.

    Raises:
        RowError: it is no container that is read, or damaged, or too long.
    """
    name = container_of(source.data[:_HEAD])
    if unread := unread_image(source.data[:_HEAD]):
        source.refuse(f"{kind} is expected, and this is an image in {unread}")
    if name is None:
        image = image_header(source.data)
        what = f"a {image.format} image" if image else "no container that is read (mp4, webm, mkv, wav, mp3, ...)"
        source.refuse(f"{kind} is expected, and this is {what}")
    size = int.from_bytes(source.data[4:8], "little")
    if source.data[:4] == _RIFF and size not in _STREAMED and size > len(source.data):
        source.refuse(f"the file is truncated: it has {len(source.data)} bytes of {size + 8}")
    try:
        container: Any
        with av.open(io.BytesIO(source.data), format=name, metadata_errors="replace") as container:
            if container.duration is not None:
                source.check_seconds(container.duration / av.time_base)
            yield container
    except av.error.FFmpegError as error:
        source.refuse(f"the file cannot be decoded as {name}: {error.strerror}; it is damaged or truncated", error)
    except _FAULTS as error:
        what = f"{type(error).__name__}: {error}"[:200]
        source.refuse(f"the file cannot be decoded as {name} ({what}); it is damaged or truncated", error)


def decoder_of(source: Source, stream: Any) -> Any:
    """Return a stream's decoder; raises RowError if FFmpeg has none."""
    if stream.codec_context is None:
        source.refuse(f"stream {stream.index} of the file has no codec that is read; convert it, or it is damaged")
    return stream.codec_context


def check_end(source: Source, seconds: float, expected: float, step: float = 0.0) -> None:
    """Raise RowError for a file that ends before its header's duration."""
    if seconds < expected * (1 - LATE) - LATE_SECONDS - 2 * step:
        source.refuse(f"the file is truncated: it ends after {seconds:.1f} s of {expected:.1f} s")
