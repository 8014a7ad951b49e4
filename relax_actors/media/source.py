"""Raw bytes of a medium, with the limits and the deadline that its decoding keeps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from relax_actors.config.media import LimitsSection
from relax_actors.errors import RowError, SlowRowError


@dataclass(frozen=True, slots=True)
class Source:
    """A raw medium.

    Attributes:
        data: its bytes.
        name: file or origin, for errors.
        limits: what it must not exceed.
        deadline: time of the monotonic clock at which decoding ends with an error.
    """

    data: bytes
    name: str
    limits: LimitsSection
    deadline: float = float("inf")

    def refuse(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        """End the row of the medium with a RowError."""
        msg = f"{self.name}: {reason}"
        raise RowError(msg) from cause

    def check_time(self) -> None:
        """Check the deadline; decoders call it between frames; raises SlowRowError if it has passed."""
        if time.monotonic() > self.deadline:
            msg = f"{self.name}: decoding took longer than the deadline of the medium; shorten it or allow more time"
            raise SlowRowError(msg)

    def check_pixels(self, width: int, height: int) -> None:
        """Check the size of an image or frame; raises RowError if it has no pixels, or too many."""
        if width < 1 or height < 1:
            self.refuse(f"its header says {width} x {height} pixels; the file is damaged")
        if width * height > (most := self.limits.max_pixels):
            self.refuse(f"{width} x {height} pixels exceed the limit of {most} pixels; reduce it or raise the limit")

    def check_resized(self, height: int, width: int) -> None:
        """Check the resized size of an image; raises RowError for too many pixels."""
        if width * height > (most := self.limits.max_pixels):
            self.refuse(
                f"its settings enlarge it to {width} x {height} pixels, more than the limit of {most} pixels; lower "
                "min_pixels and multiple, or raise the limit"
            )

    def check_seconds(self, seconds: float) -> None:
        """Check the duration of a video or sound; raises RowError if it is too long."""
        if seconds > (most := self.limits.max_seconds):
            self.refuse(f"{seconds:.1f} s exceed the limit of {most:g} s; shorten it or raise the limit")


def read_source(source: bytes | Path, name: str, limits: LimitsSection, deadline: float) -> Source:
    """Read a raw medium; raises RowError if it cannot be read, is empty, or is too large."""
    name = name or (str(source) if isinstance(source, Path) else "medium")
    try:
        size = source.stat().st_size if isinstance(source, Path) else len(source)
        if size > limits.max_bytes:
            msg = f"{name}: {size} bytes exceed the limit of {limits.max_bytes} bytes; reduce it or raise the limit"
            raise RowError(msg)
        data = source.read_bytes() if isinstance(source, Path) else source
    except OSError as error:
        msg = f"{name}: cannot be read: {error.strerror or error}"
        raise RowError(msg) from error
    if not data:
        msg = f"{name}: the file is empty"
        raise RowError(msg)
    return Source(data, name, limits, deadline)
