"""Containers of videos and sounds, opened by PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import av.error

from relax_actors.media.headers import container_of, image_header
from relax_actors.media.source import Source

_HEAD = 1024
LATE = 0.1
"""Part of its length that may be missing at the end of a file."""


@contextmanager
def opened(source: Source, kind: str) -> Iterator[Any]:
    """Open a container; errors of FFmpeg within become those of the row.

    Its format follows from its first bytes, so that a playlist or script cannot make FFmpeg open other files.

    Raises:
        RowError: it is no container that is read, or damaged, or too long.
    """
    name = container_of(source.data[:_HEAD])
    if name is None:
        image = image_header(source.data)
        what = f"a {image.format} image" if image else "no container that is read (mp4, webm, mkv, wav, mp3, ...)"
        source.refuse(f"{kind} is expected, and this is {what}")
    try:
        with av.open(io.BytesIO(source.data), format=name, metadata_errors="replace") as container:
            if container.duration is not None:
                source.check_seconds(container.duration / av.time_base)
            yield container
    except av.error.FFmpegError as error:
        source.refuse(f"the file cannot be decoded as {name}: {error.strerror}; it is damaged or truncated", error)


def check_end(source: Source, seconds: float, expected: float) -> None:
    """Refuse a truncated file.

    Raises:
        RowError: what was found ends long before the duration in its header.
    """
    if seconds < expected * (1 - LATE) - 1.0:
        source.refuse(f"the file is truncated: it ends after {seconds:.1f} s of {expected:.1f} s")
