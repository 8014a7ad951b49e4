"""Task of the demo: sort the digits of a number, "5039>" to "0359#"."""

from __future__ import annotations

import random

DIGITS = 4


def make(*, size: int | None, seed: int, digits: int = DIGITS) -> list[tuple[str, str]]:
    """Return `size` random numbers of `digits` digits; the answer has the digits in ascending order."""
    source = random.Random(seed)  # noqa: S311 not a secret
    text = "".join(source.choices("0123456789", k=digits * (size or 10_000)))
    numbers = [text[i : i + digits] for i in range(0, len(text), digits)]
    return [(f"{number}>", "".join(sorted(number))) for number in numbers]
