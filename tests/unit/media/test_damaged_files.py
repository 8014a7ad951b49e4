"""Damaged files of every kind are decoded, or refused with their name and the reason."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from relax_actors.config.media import AudioSection, LimitsSection
from relax_actors.errors import RowError
from relax_actors.media.decode_audio import decode_audio
from relax_actors.media.decode_image import decode_image
from relax_actors.media.decode_video import decode_frames, read_timeline
from relax_actors.media.sizes import SizeError, resized
from relax_actors.media.source import Source
from tests.support.media_files import frames_of, gif_file, image_file, picture, sound_file, tone, video_file, wav_file

LIMITS = LimitsSection(max_pixels=1 << 20)
DAMAGES = 30
"""Damaged copies of each file."""
FRAMES = frames_of(6)
FILES = {
    "video mp4": lambda: video_file(FRAMES, sound=tone(0.6)),
    "video webm": lambda: video_file(FRAMES, container="webm", codec="libvpx-vp9"),
    "video matroska": lambda: video_file(FRAMES, container="matroska"),
    "video avi": lambda: video_file(FRAMES, container="avi", codec="mpeg4"),
    "video flv": lambda: video_file(FRAMES, container="flv", codec="flv1"),
    "video gif": gif_file,
    "sound wav": lambda: wav_file(tone(0.3)),
    "sound mp4": lambda: sound_file(tone(0.5), 16_000, "mp4", "aac"),
    "sound flac": lambda: sound_file(tone(0.5), 16_000, "flac", "flac"),
    **{
        f"image {kind}": lambda kind=kind: image_file(picture(), kind)
        for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF")
    },
}


@cache
def file_of(name: str) -> bytes:
    return bytes(FILES[name]())  # type: ignore[no-untyped-call]


def damaged(data: bytes, order: random.Random) -> bytes:
    """Return a file that was cut off, has other bytes in its head or anywhere, or lacks some."""
    found, damage = bytearray(data), order.randrange(4)
    if damage == 0:
        return data[: order.randrange(1, len(data))]
    if damage == 1:
        at = order.randrange(len(found))
        del found[at : at + order.randint(1, 50)]
        return bytes(found)
    for _ in range(order.randint(1, 20)):
        found[order.randrange(len(found) if damage == 2 else min(len(found), 600))] = order.randrange(256)
    return bytes(found)


def decode(name: str, source: Source) -> None:
    """Decode a file as what the first word of a name says."""
    kind = name.partition(" ")[0]
    if kind == "image":
        decode_image(source)
    elif kind == "sound":
        decode_audio(source, AudioSection(), (0.0, None))
    else:
        timeline = read_timeline(source, (0.0, None))
        wanted = np.linspace(0, len(timeline.times) - 1, 3).round().astype(int)
        decode_frames(source, timeline, timeline.at(wanted), lambda frame: frame)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_damaged_file_is_decoded_or_refused_with_its_name(name: str) -> None:
    order, whole = random.Random(f"{name} 7"), file_of(name)
    decode(name, Source(whole, name, LIMITS))
    for number in range(DAMAGES):
        source = Source(damaged(whole, order), f"{name}, damage {number}", LIMITS)
        try:
            decode(name, source)
        except RowError as error:
            refused = str(error)
        else:
            continue
        assert refused.startswith(f"{source.name}: ")


@pytest.mark.parametrize(
    ("name", "codec", "replaced"),
    [("video avi", b"FMP4", b"\0\0\0\1"), ("sound wav", b"\x01\x00\x01\x00", b"\xbb\xaa\x01\x00")],
)
def test_stream_whose_codec_nobody_knows_is_refused(name: str, codec: bytes, replaced: bytes) -> None:
    assert codec in file_of(name)
    source = Source(file_of(name).replace(codec, replaced), "row 5", LIMITS)
    with pytest.raises(RowError, match=r"^row 5: stream 0 .*codec"):
        decode(name, source)


@pytest.mark.parametrize(("kind", "shown"), [("AVIF", "AVIF"), ("JPEG2000", "JPEG 2000")])
@pytest.mark.parametrize("wanted", ["image", "video"])
def test_image_of_a_format_that_is_not_read_is_named(kind: str, shown: str, wanted: str) -> None:
    source = Source(image_file(picture(), kind), "row 5", LIMITS)
    with pytest.raises(RowError, match=rf"^row 5: .*{shown}"):
        decode(wanted, source)


def test_refused_video_is_named_with_its_own_size() -> None:
    with pytest.raises(SizeError, match=r"^4000 x 4 pixels: "):
        resized(4, 4000, 28, (28 * 28, 28 * 28 * 1000), frames=4)
