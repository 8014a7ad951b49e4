"""Read a handwritten digit in a noisy picture: "<picture>?" -> "b" -> the digit of the upper right quarter -> "2".

The model sees the whole picture with an eighth of its pixels along each side: enough to see where the digit is, too few
to read it. Naming a quarter shows its middle four times as large. Needs the extra `omni`.

Every second training task begins with the right quarter already shown, so that the warm start teaches to read a digit.
Where to look it does not teach, since the quarters of its other answers are random: that is left to the rewards.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from relax_actors import Environment, Medium, Step, Task, images_of, png_of, zoomed

QUARTERS = {"a": (0, 0), "b": (1, 0), "c": (0, 1), "d": (1, 1)}
SIDE, DIGIT = 64, 16
"""Pixels of the picture's side, and of the side of the digit in the middle of its quarter."""
NOISE, BRIGHTEST = 48, 16
OVERVIEW = {"min_pixels": 64, "max_pixels": 64}
TEST_DIGITS = 360


class Zoom(Environment):
    """Shows a quarter of the picture; another answer ends the episode.

    Attributes:
        tool: whether a quarter is shown; without, every answer ends the episode.
    """

    tool: bool = True

    def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Begin with the picture of the prompt."""
        del rng
        self.picture, self.known = images_of(task)[0], task["metadata"]
        self.shown = self.known["shown"]
        return ""

    def step(self, action: str) -> Step:
        """Show a quarter, or judge an answer."""
        if self.tool and not self.shown and action in QUARTERS:
            self.shown = action
            return Step([{"type": "image", "bytes": quarter_of(self.picture, action)}])
        found = {"looked": bool(self.shown), "found": self.shown == self.known["quarter"]}
        return Step(reward=float(action == self.known["digit"]), done=True, metrics=found)


def quarter_of(picture: np.ndarray, name: str) -> bytes:
    """Return the middle of a quarter as a PNG file."""
    left, top = QUARTERS[name]
    return png_of(zoomed(picture, (left / 2 + 1 / 8, top / 2 + 1 / 8, left / 2 + 3 / 8, top / 2 + 3 / 8)))


def make(*, size: int | None, seed: int) -> list[Task]:
    """Return training tasks; the answers of those without a shown quarter are random quarters."""
    return [_task(f"{seed} {i}", shown=i % 2 == 0) for i in range(size or 10_000)]


def blind(*, size: int | None, seed: int) -> list[Task]:
    """Return training tasks whose answers are the digits, to see what can be read in the whole picture."""
    tasks = (_task(f"{seed} {i}") for i in range(size or 10_000))
    return [replace(task, answer=task.metadata["digit"]) for task in tasks]


def held_out(*, size: int | None, seed: int) -> list[Task]:
    """Return tasks with other digits than those of training tasks."""
    return [_task(f"{seed} {i}", test=True) for i in range(size or 10_000)]


@lru_cache
def _digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the images, `[digits, 16, 16] uint8`, their values, and a random order."""
    data = load_digits()
    images = (data.images * (255 / BRIGHTEST)).astype(np.uint8)
    enlarged = images.repeat(DIGIT // 8, axis=1).repeat(DIGIT // 8, axis=2)
    return enlarged, data.target, np.random.default_rng(0).permutation(len(images))


def _task(seed: str, *, shown: bool = False, test: bool = False) -> Task:
    source = random.Random(seed)  # noqa: S311 not a secret
    images, values, order = _digits()
    number = int(source.choice(order[:TEST_DIGITS] if test else order[TEST_DIGITS:]))
    quarter, guess = source.choice("abcd"), source.choice("abcd")
    picture = np.random.default_rng(source.randrange(1 << 32)).integers(0, NOISE, (SIDE, SIDE), np.uint8)
    left, top = (SIDE // 2 * at + (SIDE // 2 - DIGIT) // 2 for at in QUARTERS[quarter])
    spot = picture[top : top + DIGIT, left : left + DIGIT]
    np.maximum(spot, images[number], out=spot)
    digit, overview = str(values[number]), Medium("image", data=png_of(picture), options=OVERVIEW)
    known = {"quarter": quarter, "digit": digit, "shown": quarter if shown else ""}
    if not shown:
        return Task("<image>?", guess, known, media=(overview,))
    part = Medium("image", data=quarter_of(np.stack([picture] * 3, axis=2), quarter))
    return Task(f"<image>?{quarter}<image>", digit, known, media=(overview, part))
