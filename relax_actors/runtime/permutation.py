"""Permutations by seed: item i of a permutation of any size, without a list of the whole."""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

LISTED = 1 << 16
"""Size up to which a permutation is a list, which NumPy makes; larger ones are computed item by item."""
_ROUNDS = 6


def permuted(seed: int, size: int, i: int) -> int:
    """Return item `i` of the permutation of `range(size)` that belongs to a seed below 2**64."""
    return int(_listed(seed, size)[i]) if size <= LISTED else _computed(seed, size, i)


@lru_cache(maxsize=32)
def _listed(seed: int, size: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=seed)).permutation(size)


def _computed(seed: int, size: int, i: int) -> int:
    """Return item i, encrypted by a Feistel network over the next power of 4 until it is below `size`.

    J. Black and P. Rogaway, "Ciphers with arbitrary finite domains" (2002), section 4: as the network permutes its
    domain, the first value below `size` on the cycle from each i is another one.
    """
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for number in range(_ROUNDS):
            mixed = xxhash.xxh3_64_intdigest(struct.pack("<QQB", seed, right, number))
            left, right = right, left ^ (mixed & mask)
        i = left << half | right
        if i < size:
            return i
