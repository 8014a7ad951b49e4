"""Types of the plain fields of a trace, which files of other programs may have wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np

MAX_NUMBER = float(np.finfo(np.float32).max)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number, and a whole number one that float32 has room for."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= MAX_NUMBER


def wrong_field(trace: object) -> tuple[str, str] | None:
    """Return a field of a wrong type, and what to write; None if all are right."""
    return next(((name, what) for name, (what, fits) in _KINDS.items() if not fits(getattr(trace, name))), None)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= np.iinfo(np.int32).max


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and is_number(v) for k, v in value.items())


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("run", "row", "text", "finish_reason", "prompt", "answer", "author"), ("a text", _is_text)),
    **dict.fromkeys(("prompt_messages", "messages", "tools"), ("a list of objects", _are_objects)),
    **dict.fromkeys(("components", "metrics"), ("an object of numbers", _are_numbers)),
    "metadata": ("an object", lambda value: isinstance(value, dict)),
    "greedy": ("true or false", lambda value: isinstance(value, bool)),
    "sample": ("a whole number of at least 0", _is_count),
    "step": ("a whole number of at least 0, or null", lambda value: value is None or _is_count(value)),
    "reward": ("a number or null", lambda value: value is None or is_number(value)),
}
