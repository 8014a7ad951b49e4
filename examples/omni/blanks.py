"""Media without content, of the same size: black pictures and videos, silence. With them a model must guess."""

from __future__ import annotations

import io
import wave

import clips
import numpy as np


def blank_png(content: bytes) -> tuple[str, bytes]:
    """Return a name and a black picture of the same size."""
    import cv2  # noqa: PLC0415 with the extra `media`

    pixels = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_GRAYSCALE)
    height, width = pixels.shape
    return f"blank-{width}x{height}.png", bytes(cv2.imencode(".png", np.zeros_like(pixels))[1])


def blank_wav(content: bytes) -> tuple[str, bytes]:
    """Return a name and silence of the same length."""
    target = io.BytesIO()
    with wave.open(io.BytesIO(content)) as reader, wave.open(target, "wb") as writer:
        writer.setparams(reader.getparams())
        writer.writeframes(bytes(2 * reader.getnframes()))
        return f"blank-{reader.getnframes()}.wav", target.getvalue()


def blank_mp4(content: bytes) -> tuple[str, bytes]:
    """Return a name and a black video of the same size and length."""
    import av  # noqa: PLC0415 with the extra `media`

    with av.open(io.BytesIO(content)) as container:
        frames = [frame.to_ndarray(format="gray8") for frame in container.decode(video=0)]
    black = np.zeros((len(frames), *frames[0].shape), np.uint8)
    return "blank-{}x{}x{}.mp4".format(*black.shape), clips.mp4(black)


BLANKS = {"images": blank_png, "audios": blank_wav, "videos": blank_mp4}
"""For each list of media in a row: makes a file without content from the content of another."""
