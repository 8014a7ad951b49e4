"""Plain data that JSON can hold."""

from __future__ import annotations

import json
import math
from typing import Any


def encoded(body: Any) -> bytes:
    """Return a value as JSON; numbers that JSON lacks (NaN and infinities) become null."""
    try:
        return json.dumps(body, allow_nan=False, ensure_ascii=False).encode(errors="replace")
    except ValueError:
        return json.dumps(_finite(body), allow_nan=False, ensure_ascii=False).encode(errors="replace")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
