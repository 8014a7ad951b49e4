"""Digests of the cells that a step reads, so that a replay names a changed row.

A digest is of the content of a cell: two runs that compute the same numbers have the same digests, whichever actor
wrote the cells and wherever their arrays lie.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from relax_actors.errors import RelaxError

DIGESTS = "digests"
"""Key of the digests beside the columns of a row."""
_BITS = 0xFFFFFFFF


def digests_of(columns: Mapping[str, Any], *, from_data: bool = False) -> dict[str, int]:
    """Return the 32-bit digest of each column of a row; 0 for a column that cannot be read.

    Advantages of rows from the data are left out: they follow from the trajectory and are no column.
    """
    return {name: digest_of(value) for name, value in columns.items() if not (from_data and name == "advantage")}


def digest_of(value: Any) -> int:
    """Return the 32-bit digest of the content of a cell."""
    if isinstance(value, RelaxError):
        return 0
    hasher = xxhash.xxh3_64()
    _add(hasher, value)
    return hasher.intdigest() & _BITS


def _add(hasher: xxhash.xxh3_64, value: Any) -> None:
    if isinstance(value, np.ndarray):
        hasher.update(f"{value.dtype.str}{value.shape}".encode())
        hasher.update(np.ascontiguousarray(value).tobytes())
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if (own := getattr(value, field.name)) is not None:
                hasher.update(field.name.encode())
                _add(hasher, own)
    elif isinstance(value, Mapping):
        for name in sorted(value):
            hasher.update(f"{name}:".encode())
            _add(hasher, value[name])
    elif isinstance(value, list | tuple):
        hasher.update(f"{len(value)}[".encode())
        for item in value:
            _add(hasher, item)
    else:
        hasher.update(repr(value).encode())
