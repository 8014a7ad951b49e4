"""Sampled frames of a video."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from av.stream import Disposition

from relax_actors.media.container import check_end, decoder_of, opened
from relax_actors.media.source import Source

UNEVEN = 0.5
"""A gap between two frames that differs from the mean one by more than this part of it makes a rate variable."""
WRONG = 0.1
"""A rate in the header that differs from that of the frames by more than this part is not used."""
LOST = 2
"""Frames at the end that a codec may hold back."""
ATTACHED = Disposition.attached_pic


@dataclass(frozen=True, slots=True)
class Timeline:
    """Frames of a video, or of a part of it.

    Attributes:
        times: seconds of each frame, in order.
        first: index of the first frame in the whole video.
        fps: mean number of frames a second.
        even: whether the frames follow each other at equal times.
    """

    times: np.ndarray
    first: int
    fps: float
    even: bool

    def at(self, indices: np.ndarray) -> np.ndarray:
        """Return the frames to take for indices that assume equal times: the nearest ones in time."""
        if self.even:
            return indices
        span = self.times[-1] - self.times[0]
        wanted = self.times[0] + indices / max(len(self.times) - 1, 1) * span
        right = np.clip(np.searchsorted(self.times, wanted), 1, len(self.times) - 1)
        nearer = wanted - self.times[right - 1] <= self.times[right] - wanted
        return np.where(nearer, right - 1, right)

    def seconds(self, indices: np.ndarray) -> np.ndarray:
        """Return the time of frames since the beginning of the part."""
        return indices / self.fps if self.even else self.times[indices] - self.times[0]


@dataclass(frozen=True, slots=True)
class Clip:
    """Sampled frames.

    Attributes:
        frames: [frames, height, width, 3] uint8, as the caller resized them.
        width: pixels of the raw frame.
        height: pixels of the raw frame.
    """

    frames: np.ndarray
    width: int
    height: int


def read_timeline(source: Source, part: tuple[float, float | None]) -> Timeline:
    """Return the times of a video part's frames, undecoded; raises RowError."""
    with opened(source, "a video") as container:
        stream = _stream(source, container)
        times: list[float] = []
        last = 0.0
        for packet in container.demux():
            source.check_time()
            stamp = packet.dts if packet.pts is None else packet.pts
            if packet.size and stamp is not None and packet.time_base is not None:
                last = max(last, float((stamp + (packet.duration or 0)) * packet.time_base))
            if packet.stream is stream and packet.size and not packet.is_discard:
                times.append(len(times) if stamp is None else float(stamp * packet.time_base))
            if len(times) > (most := source.limits.max_frames):
                source.refuse(f"the video has more frames than the limit of {most}; shorten it or raise the limit")
        if not times:
            source.refuse("the video has no frames")
        step = (max(times) - min(times)) / max(len(times) - 1, 1)
        check_end(source, last, (container.duration or 0) / av.time_base, step)
        return _timeline(source, np.sort(np.array(times)), float(stream.average_rate or 0), part)


def _stream(source: Source, container: Any) -> Any:
    """Return the stream of the pictures; covers of sound files do not count."""
    streams = [stream for stream in container.streams.video if not stream.disposition & ATTACHED]
    if not streams:
        source.refuse("the file has no video, only sound" if container.streams.audio else "the file has no video")
    stream = streams[0]
    decoder = decoder_of(source, stream)
    source.check_pixels(decoder.width, decoder.height)
    return stream


def _timeline(source: Source, times: np.ndarray, fps: float, part: tuple[float, float | None]) -> Timeline:
    gaps = np.diff(times)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    even = mean <= 0 or bool(np.abs(gaps - mean).max() <= UNEVEN * mean)
    if mean > 0 and (not even or abs(fps * mean - 1) > WRONG):
        fps = 1 / mean
    fps = fps or 1.0
    begin = part[0] + times[0]
    end = times[-1] + 1 if part[1] is None else part[1] + times[0]
    # The frame that is shown at the beginning is part of it.
    low = max(int(np.searchsorted(times, begin, side="right")) - 1, 0)
    high = int(np.searchsorted(times, end, side="left"))
    if part[0] > times[-1] - times[0] + 1 / fps or high <= low:
        length = float(times[-1] - times[0]) + 1 / fps
        source.refuse(f"the part from {part[0]:g} s on has no frames: the video lasts {length:.1f} s")
    return Timeline(times[low:high], low, fps, even)


def decode_frames(
    source: Source, timeline: Timeline, indices: np.ndarray, resize: Callable[[np.ndarray], np.ndarray]
) -> Clip:
    """Decode a video up to the last wanted frame, and keep the resized wanted ones.

    Args:
        source: the video.
        timeline: its frames.
        indices: wanted frames of the timeline, in order; one can be wanted several times.
        resize: called with each wanted frame, upright [height, width, 3] uint8.

    Raises:
        RowError: a frame is missing or too large.
    """
    wanted = (indices + timeline.first).tolist()
    kept: list[np.ndarray] = []
    width = height = 0
    with opened(source, "a video") as container:
        stream = _stream(source, container)
        stream.codec_context.thread_count = 1
        # Frames can grow within a video. Twice the limit, because codecs round sizes up; the exact check is below.
        stream.codec_context.options = {"max_pixels": str(2 * source.limits.max_pixels)}
        last: np.ndarray | None = None
        for number, frame in enumerate(_decoded(source, container, stream)):
            source.check_time()
            source.check_pixels(frame.width, frame.height)
            if len(kept) < len(wanted) and number < wanted[len(kept)]:
                continue
            image = upright(frame)
            height, width = image.shape[:2]
            last = resize(image)
            while len(kept) < len(wanted) and number >= wanted[len(kept)]:
                kept.append(last)
            if len(kept) == len(wanted):
                break
        missing = len(wanted) - len(kept)
        if missing and last is not None and number + LOST >= wanted[-1]:
            kept += [last] * missing
        elif missing:
            source.refuse(f"frame {wanted[len(kept)]} of the video cannot be decoded; the file is damaged or truncated")
    if len({frame.shape for frame in kept}) > 1:
        source.refuse("the size of the video changes within it")
    return Clip(np.stack(kept), width, height)


def _decoded(source: Source, container: Any, stream: Any) -> Iterator[Any]:
    """Decode frames; the decoder refuses too many pixels with EINVAL beforehand."""
    count = 0
    try:
        for frame in container.decode(stream):
            yield frame
            count += 1
    except av.error.ArgumentError as error:
        most = source.limits.max_pixels
        source.refuse(f"frame {count} of the video is damaged, or exceeds the limit of {most} pixels", error)


def upright(frame: Any) -> np.ndarray:
    """Return a frame as [height, width, 3] uint8, turned as its display matrix says."""
    image = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(image, round(frame.rotation / 90) % 4))
