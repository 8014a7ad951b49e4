"""Videos of handwritten digits shown one after the other, encoded as H.264 in MP4."""

from __future__ import annotations

import io
from fractions import Fraction

import numpy as np
from handwritten import Digit

FPS = 4
FRAMES_OF_DIGIT = 4
ZOOM = 2  # H.264 blurs strokes of one or two pixels
_OPTIONS = {"crf": "10", "preset": "ultrafast", "threads": "1"}


def frames_of(digits: list[Digit]) -> np.ndarray:
    """Show each digit for `FRAMES_OF_DIGIT` frames: `[frames, side, side] uint8`."""
    frames = [digit.pixels for digit in digits for _ in range(FRAMES_OF_DIGIT)]
    return np.stack(frames).repeat(ZOOM, axis=1).repeat(ZOOM, axis=2)


def mp4(frames: np.ndarray) -> bytes:
    """Encode grey frames `[frames, height, width] uint8` at `FPS` frames a second."""
    import av  # noqa: PLC0415 with the extra `media`

    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS, options=_OPTIONS)
        stream.height, stream.width = frames.shape[1:]
        stream.pix_fmt, stream.time_base = "yuv420p", Fraction(1, FPS)
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="gray8")))
        container.mux(stream.encode(None))
    return target.getvalue()
