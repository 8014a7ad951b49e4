"""Kind and size of a medium from its first bytes, without a decoder."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Format of an image, its size as stored, and whether it can have an alpha channel."""

    format: str
    width: int
    height: int
    alpha: bool


CONTAINERS: tuple[tuple[int, bytes, str], ...] = (
    (4, b"ftyp", "mp4"),
    (4, b"moov", "mp4"),
    (4, b"mdat", "mp4"),
    (4, b"wide", "mp4"),
    (4, b"free", "mp4"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
    (8, b"AVI ", "avi"),
    (8, b"WAVE", "wav"),
    (0, b"GIF8", "gif"),
    (0, b"OggS", "ogg"),
    (0, b"fLaC", "flac"),
    (0, b"ID3", "mp3"),
    (0, b"FLV", "flv"),
    (0, b"0&\xb2u\x8ef\xcf\x11", "asf"),
    (0, b"\x00\x00\x01\xba", "mpeg"),
    (8, b"AIFF", "aiff"),
    (8, b"AIFC", "aiff"),
    (0, b"caff", "caf"),
    (0, b"#!AMR", "amr"),
)
"""Offset, bytes and name of containers in FFmpeg. Playlists are missing on purpose: they name other files and URLs."""
_PACKET = 188
"""Bytes of a packet of an MPEG transport stream."""


def container_of(head: bytes) -> str | None:
    """Return FFmpeg's name of a file's container; None if it is not read."""
    for offset, magic, name in CONTAINERS:
        if head[offset : offset + len(magic)] == magic:
            return name
    if head[:1] == b"G" and head[_PACKET : _PACKET + 1] == b"G":
        return "mpegts"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:  # noqa: PLR2004 the sync word of ADTS
        return "aac"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:  # noqa: PLR2004 the sync word of MPEG audio
        return "mp3"
    return None


UNREAD: tuple[tuple[int, bytes, str], ...] = (
    (8, b"avif", "AVIF"),
    (8, b"avis", "AVIF"),
    (8, b"heic", "HEIC"),
    (8, b"heix", "HEIC"),
    (8, b"mif1", "HEIF"),
    (4, b"jP  \r\n\x87\n", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (4, b"JXL \r\n\x87\n", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
)
"""Offset, bytes and name of formats of images that are not read."""


def unread_image(head: bytes) -> str:
    """Return the name of the format of an image that is not read; empty if it is none of those."""
    for offset, magic, name in UNREAD:
        is_brand = offset == 8  # noqa: PLR2004 of a file of boxes; AVI and WAV have their names there, too
        if head[offset : offset + len(magic)] == magic and (not is_brand or head[4:8] == b"ftyp"):
            return name
    return ""


def image_header(data: bytes) -> ImageHeader | None:
    """Return the header of an image; None for other, or cut-off, files."""
    try:
        for magic, read in READERS:
            if data.startswith(magic):
                return read(data)
    except (struct.error, IndexError):
        return None
    return None


def _png(data: bytes) -> ImageHeader:
    width, height, _, color = struct.unpack_from(">IIBB", data, 16)
    # A palette and a single colour can be transparent too, by a chunk in front of the pixels.
    alpha = color in (4, 6) or b"tRNS" in data[: data.find(b"IDAT")]
    return ImageHeader("png", width, height, alpha)


def _jpeg(data: bytes) -> ImageHeader | None:
    at = 2
    while True:
        while data[at] == 0xFF:  # noqa: PLR2004 fill bytes before a marker
            at += 1
        marker = data[at]
        (length,) = struct.unpack_from(">H", data, at + 1)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # noqa: PLR2004 start of a frame
            height, width = struct.unpack_from(">HH", data, at + 4)
            return ImageHeader("jpeg", width, height, alpha=False)
        at += 1 + length
        if data[at] != 0xFF:  # noqa: PLR2004 no marker
            return None


def _gif(data: bytes) -> ImageHeader:
    width, height = struct.unpack_from("<HH", data, 6)
    return ImageHeader("gif", width, height, alpha=True)


def _bmp(data: bytes) -> ImageHeader:
    (size,) = struct.unpack_from("<I", data, 14)
    old = size == 12  # noqa: PLR2004 bytes of OS/2's header
    width, height = struct.unpack_from("<HH" if old else "<ii", data, 18)
    return ImageHeader("bmp", abs(width), abs(height), alpha=False)


def _riff(data: bytes) -> ImageHeader | None:
    if data[8:12] != b"WEBP":
        return None
    chunk = data[12:16]
    if chunk == b"VP8X":
        width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        return ImageHeader("webp", width, height, bool(data[20] & 0x10))
    if chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ImageHeader("webp", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), bool(bits >> 28 & 1))
    width, height = struct.unpack_from("<HH", data, 26)
    return ImageHeader("webp", width & 0x3FFF, height & 0x3FFF, alpha=False)


def _tiff(data: bytes) -> ImageHeader | None:
    order = "<" if data[:2] == b"II" else ">"
    (start,) = struct.unpack_from(order + "I", data, 4)
    (entries,) = struct.unpack_from(order + "H", data, start)
    tags: dict[int, int] = {}
    for at in range(start + 2, start + 2 + 12 * entries, 12):
        tag, kind = struct.unpack_from(order + "HH", data, at)
        value = struct.unpack_from(order + ("H" if kind == 3 else "I"), data, at + 8)[0]  # noqa: PLR2004 SHORT
        tags.setdefault(tag, value)  # libtiff ignores a tag that is repeated
    width, height, extra = tags.get(256), tags.get(257), tags.get(338)
    return None if width is None or height is None else ImageHeader("tiff", width, height, extra is not None)


READERS: tuple[tuple[bytes, Callable[[bytes], ImageHeader | None]], ...] = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8", _jpeg),
    (b"GIF8", _gif),
    (b"BM", _bmp),
    (b"RIFF", _riff),
    (b"II*\x00", _tiff),
    (b"MM\x00*", _tiff),
)
