"""Real media files, made in memory: images by Pillow, videos and sounds by PyAV."""

from __future__ import annotations

import io
import wave
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image


def picture(height: int = 60, width: int = 80, seed: int = 0) -> np.ndarray:
    """Return a smooth random image, [height, width, 3] uint8."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def image_file(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image file."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def gif_file(count: int = 5, seconds: float = 0.1) -> bytes:
    """Return an animated GIF."""
    frames = [Image.fromarray(picture(seed=number)) for number in range(count)]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=int(seconds * 1000), loop=0)
    return out.getvalue()


def tone(seconds: float = 1.0, rate: int = 16_000, hertz: float = 440.0) -> np.ndarray:
    """Return a sine, [samples] float32."""
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def wav_file(samples: np.ndarray, rate: int = 16_000) -> bytes:
    """Return a WAV file of 16 bits; samples are [samples] or [channels, samples]."""
    channels = np.atleast_2d(samples)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((channels.T * 32767).round().astype("<i2").tobytes())
    return out.getvalue()


def sound_file(samples: np.ndarray, rate: int, container: str, codec: str) -> bytes:
    """Return a sound of one channel in a container that PyAV writes."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        _write_sound(file, file.add_stream(codec, rate=rate, layout="mono"), samples, rate)
    return out.getvalue()


def video_file(
    frames: list[np.ndarray],
    fps: int = 10,
    *,
    container: str = "mp4",
    codec: str = "libx264",
    sound: np.ndarray | None = None,
    times: list[float] | None = None,
    rotation: int = 0,
) -> bytes:
    """Return a video; `times` are the seconds of the frames, evenly by default; its sound has 16 kHz."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        heard: Any = None
        if sound is not None:
            heard = file.add_stream("aac" if container == "mp4" else "libopus", rate=16_000, layout="mono")
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = round(times[number] * 1000), Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
        if heard is not None and sound is not None:
            _write_sound(file, heard, sound, 16_000)
    return out.getvalue()


def growing_video_file(sides: list[int], fps: int = 4) -> bytes:
    """Return a WebM whose frames are squares of these sides; its header has the first one."""
    out = io.BytesIO()
    with av.open(out, "w", format="webm") as file:
        stream: Any = file.add_stream("libvpx-vp9", rate=fps)
        stream.width = stream.height = sides[0]
        stream.pix_fmt = "yuv420p"
        for number, side in enumerate(sides):
            encoder: Any = av.CodecContext.create("libvpx-vp9", "w")
            encoder.width = encoder.height = side
            encoder.pix_fmt, encoder.time_base = "yuv420p", Fraction(1, fps)
            frame = av.VideoFrame.from_ndarray(np.full((side, side, 3), 40, np.uint8), format="rgb24")
            frame.pts, frame.time_base = 0, encoder.time_base
            for packet in [*encoder.encode(frame), *encoder.encode(None)]:
                packet.stream, packet.time_base = stream, encoder.time_base
                packet.pts = packet.dts = number
                file.mux(packet)
    return out.getvalue()


def _write_sound(file: Any, stream: Any, samples: np.ndarray, rate: int) -> None:
    frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
    frame.sample_rate, frame.pts = rate, 0
    size = stream.codec_context.frame_size or None
    resampler = av.AudioResampler(format=stream.format, layout="mono", rate=rate, frame_size=size)
    for part in (*resampler.resample(frame), *resampler.resample(None)):
        file.mux(stream.encode(part))
    file.mux(stream.encode())


def frames_of(count: int, height: int = 64, width: int = 96) -> list[np.ndarray]:
    """Return smooth frames, each of another brightness."""
    return [
        (picture(height, width, seed=3) // 2 + 127 * number // max(count - 1, 1)).astype(np.uint8)
        for number in range(count)
    ]
