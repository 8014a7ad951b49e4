"""Prefixes that token sequences share, so that an engine computes each of them once.

The hidden states of a causal model depend on earlier tokens alone, so sequences that begin alike have the same states
up to their first difference. The samples of a group share their prompt, and the branches of a session a tree of
prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from numpy.typing import NDArray

LEAST_TOKENS = 4
"""Shortest prefix that is shared; attention to shorter ones costs more than computing them again."""


def find_shared_prefixes(keys: Sequence[NDArray[Any]]) -> tuple[list[int], list[int]]:
    """Order sequences so that each shares the longest prefix with its predecessor.

    Args:
        keys: `[len]` or `[len, n]` integers of each sequence, all of one dtype. Tokens are the same if their keys and
            those of all tokens before them are equal.

    Returns:
        Indices into `keys` in this order, and the number of tokens that the sequence of each index shares with its
        predecessor: 0 for the first one, and where it would be less than `LEAST_TOKENS`.
    """
    # In the order of their bytes, sequences with a common prefix are neighbours.
    order = sorted(range(len(keys)), key=lambda i: (keys[i].tobytes(), i))
    shared = [0] * len(keys)
    for before, after in pairwise(order):
        length = _common(keys[before], keys[after])
        shared[after] = length if length >= LEAST_TOKENS else 0
    return order, shared


def _common(left: NDArray[Any], right: NDArray[Any]) -> int:
    """Return the number of leading equal rows."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    if differs.ndim > 1:
        differs = differs.any(-1)
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
