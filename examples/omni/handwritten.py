"""Pictures of handwritten digits, from scikit-learn: 1,797 real ones of 8 x 8 pixels, split into train and test."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from relax_actors import ConfigError

SCALE = 2  # pixels of ours for one of the data set, along each axis
SIDE = 8 * SCALE
_TEST = 360
_BRIGHTEST = 16
_TURN, _SCALE, _SHIFT = 12.0, 0.12, 1.2
"""Most degrees, part of the size and pixels by which `moved` changes a picture."""


@dataclass(frozen=True)
class Digit:
    """A picture `[SIDE, SIDE] uint8`, white on black, and the digit in it."""

    pixels: np.ndarray
    value: int


def handwritten(*, test: bool) -> list[Digit]:
    """Return the training or the test pictures; no picture is in both.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 optional, and takes a second
    except ImportError as error:
        msg = "the handwritten digits come with scikit-learn, which is not installed; pip install scikit-learn"
        raise ConfigError(msg) from error
    data = load_digits()
    pixels = (data.images * (255 / _BRIGHTEST)).astype(np.uint8).repeat(SCALE, axis=1).repeat(SCALE, axis=2)
    order = list(range(len(pixels)))
    random.Random(0).shuffle(order)  # noqa: S311 the split is the same for every seed of a data set
    chosen = order[:_TEST] if test else order[_TEST:]
    return [Digit(pixels[i], int(data.target[i])) for i in chosen]


def moved(digit: Digit, source: random.Random) -> Digit:
    """Turn, scale and shift a digit a little, so that no two training rows show the same pixels.

    With the 1,437 pictures alone a model learns them by heart, and reads 2 of 100 held-out pairs fewer.
    """
    import cv2  # noqa: PLC0415 with the extra `media`

    centre = ((SIDE - 1) / 2, (SIDE - 1) / 2)
    matrix = cv2.getRotationMatrix2D(centre, source.uniform(-_TURN, _TURN), source.uniform(1 - _SCALE, 1 + _SCALE))
    matrix[:, 2] += source.uniform(-_SHIFT, _SHIFT), source.uniform(-_SHIFT, _SHIFT)
    return Digit(cv2.warpAffine(digit.pixels, matrix, (SIDE, SIDE)), digit.value)


def side_by_side(digits: list[Digit]) -> np.ndarray:
    """Join pictures from left to right: `[SIDE, n * SIDE] uint8`."""
    return np.concatenate([digit.pixels for digit in digits], axis=1)
