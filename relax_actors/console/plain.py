"""Plain data that JSON can hold."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from typing import Any


def encoded(body: Any) -> bytes:
    """Return a value, dataclasses included, as JSON; numbers that JSON lacks (NaN and infinities) become null."""
    try:
        text = json.dumps(body, allow_nan=False, ensure_ascii=False, default=_fields)
    except ValueError:
        text = json.dumps(_finite(body), allow_nan=False, ensure_ascii=False)
    return text.encode(errors="replace")


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; raises TypeError for any other value."""
    if not is_dataclass(value):
        msg = f"a {type(value).__name__} is no plain data"
        raise TypeError(msg)
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _finite(value: Any) -> Any:
    if is_dataclass(value):
        value = _fields(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
