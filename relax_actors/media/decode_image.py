"""Images as RGB arrays, upright, without alpha."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np

from relax_actors.media.headers import ImageHeader, container_of, image_header, unread_image
from relax_actors.media.source import Source

cv2.utils.logging.setLogLevel(0)  # what is wrong with an image is in the error of its row
_WHITE = 255
_TURNS: tuple[Callable[[Any], Any], ...] = (
    lambda image: image,
    lambda image: image[::-1, ::-1],
    lambda image: np.rot90(image, 3),
    np.rot90,
    lambda image: image[:, ::-1],
    lambda image: image[::-1],
    lambda image: image.swapaxes(0, 1),
    lambda image: image[::-1, ::-1].swapaxes(0, 1),
)
"""The eight orientations of EXIF."""


def decode_image(source: Source) -> np.ndarray:
    """Return an image as [height, width, 3] uint8; of an animation the first frame.

    The orientation of EXIF is applied, 16 bits become 8, grey and CMYK become RGB, transparent pixels lie on white.

    Raises:
        RowError: it is no image, damaged, or too large.
    """
    header = image_header(source.data)
    if unread := unread_image(source.data):
        source.refuse(f"the image is {unread}, which is not read; convert it to PNG, JPEG or WebP")
    if header is None:
        container = container_of(source.data[:1024])
        what = f"a {container} file" if container else "no PNG, JPEG, GIF, WebP, TIFF or BMP"
        source.refuse(f"an image is expected, and this is {what} or cut off in its header")
    source.check_pixels(header.width, header.height)
    source.check_time()
    image = _decode(source, cv2.IMREAD_COLOR_RGB)
    if header.alpha:
        image = _on_white(image, _decode(source, cv2.IMREAD_UNCHANGED), multiplied=header.format == "tiff")
    _check_whole(source, header)
    return np.ascontiguousarray(image)


def _decode(source: Source, flags: int) -> np.ndarray:
    """Decode an image; raises RowError if damaged, MemoryError if too large."""
    try:
        image = cv2.imdecode(np.frombuffer(source.data, np.uint8), flags)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError from error
        source.refuse(f"the image cannot be decoded: {error}", error)
    if image is None:
        source.refuse("the image cannot be decoded; the file is damaged or truncated")
    source.check_pixels(image.shape[1], image.shape[0])
    return np.asarray(image)


def _on_white(image: np.ndarray, stored: np.ndarray, *, multiplied: bool) -> np.ndarray:
    """Return an image on white.

    Args:
        image: its pixels upright, without alpha.
        stored: its pixels as stored, with alpha if it has any.
        multiplied: whether colours of 8 bits are multiplied with alpha already, as libtiff returns them.
    """
    if stored.ndim != 3 or stored.shape[2] != 4:  # noqa: PLR2004 height, width, channels; with alpha
        return image
    if stored.dtype == np.uint16:
        multiplied = False
        stored = (stored >> 8).astype(np.uint8)
    colors, alpha = stored[:, :, 2::-1], stored[:, :, 3:].astype(np.uint16)
    if alpha.min() == _WHITE:
        return image
    # libtiff turns both alike; other formats store the orientation apart from the pixels.
    turn = _TURNS[0] if multiplied else min(_TURNS, key=lambda turned: _difference(turned(colors), image))
    alpha = turn(alpha)
    # Colours are those as stored, because decoders differ in what they make of transparent ones.
    share = np.full_like(alpha, _WHITE) if multiplied else alpha
    mixed = turn(colors) * share + _WHITE * (_WHITE - alpha)
    return np.asarray((mixed + _WHITE // 2) // _WHITE, np.uint8)


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(cv2.norm(np.ascontiguousarray(one), other)) if one.shape == other.shape else float("inf")


def _check_whole(source: Source, header: ImageHeader) -> None:
    """Raise RowError for a file without its end marker: decoders would fill it with grey."""
    tail = source.data[-4096:]
    cut = (header.format == "jpeg" and b"\xff\xd9" not in tail) or (header.format == "png" and b"IEND" not in tail)
    if cut:
        source.refuse("the image is truncated: its end is missing")
