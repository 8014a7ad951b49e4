"""Convert values to plain data, which msgpack encodes and which is equal in every process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

_SMALLEST, _LARGEST = -(1 << 63), (1 << 64) - 1


def plain(value: object) -> Any:  # noqa: PLR0911 one for each kind of value
    """Convert `value` to None, bool, int, float, str, bytes, list, or dict with str keys.

    Tuples and other iterables become lists; sets become sorted lists; NumPy arrays become lists and scalars numbers;
    dates become ISO 8601 text and timedeltas seconds; dataclasses become dicts. Integers beyond 64 bits, fractions,
    decimals and all other values become text.
    """
    if type(value) is list:  # first, since a row may have a million
        return [plain(item) for item in value]
    if type(value) is str and value.isascii():  # as most texts of rows are
        return value
    for kind, convert in _SCALARS:
        if isinstance(value, kind):
            return convert(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return _sorted([plain(item) for item in value])
    if hasattr(value, "tolist"):
        listed = value.tolist()
        return str(value) if type(listed) is type(value) else plain(listed)
    return [plain(item) for item in value] if isinstance(value, Iterable) else str(value)


_SCALARS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...] = (
    ((type(None), bool, bytes), lambda value: value),
    (Enum, lambda value: plain(value.value)),
    (str, lambda value: value.encode(errors="replace").decode()),
    ((Fraction, Decimal), str),
    (Integral, lambda value: int(value) if _SMALLEST <= value <= _LARGEST else str(int(value))),
    (Real, float),
    ((date, time), lambda value: value.isoformat()),
    (timedelta, lambda value: value.total_seconds()),
)


def _sorted(items: list[Any]) -> list[Any]:
    try:
        return sorted(items)
    except TypeError:
        return sorted(items, key=repr)
