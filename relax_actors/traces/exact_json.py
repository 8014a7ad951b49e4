"""JSON that comes back as it was: floats keep their bits, and bytes are written in base64."""

from __future__ import annotations

import base64
import json
from typing import Any

from relax_actors.traces.model import TraceError

BYTES = "base64"
"""Only key of an object that stands for bytes."""


def dumps(value: Any, where: str) -> str:
    """Return a value as a line of JSON; raises TraceError if it would read otherwise."""
    try:
        text = json.dumps(value, default=_encoded, ensure_ascii=False, separators=(",", ":"))
        same = loads(text) == value
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"{where}: it has data that JSON cannot hold ({error}); remove the data"
        raise TraceError(msg) from error
    if not same:
        msg = (
            f"{where}: it has data that JSON changes, such as keys that are numbers, tuples, or NaN; make the "
            "metadata of its row plain texts, numbers, lists and objects"
        )
        raise TraceError(msg)
    return text


def loads(text: str) -> Any:
    """Return the value of a JSON text; raises ValueError if it is no JSON."""
    return json.loads(text, object_hook=_decoded)


def decoded(value: Any) -> Any:
    """Return parsed JSON with bytes in place of the objects that stand for them."""
    if isinstance(value, dict):
        return _decoded({key: decoded(item) for key, item in value.items()})
    return [decoded(item) for item in value] if isinstance(value, list) else value


def _encoded(value: object) -> Any:
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    msg = f"a value of type {type(value).__name__}"
    raise TypeError(msg)


def _decoded(value: dict[str, Any]) -> Any:
    if value.keys() == {BYTES} and isinstance(value[BYTES], str):
        return base64.b64decode(value[BYTES])
    return value
