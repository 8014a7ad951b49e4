"""Fields of foreign records: token ids, log-probs and numbers, checked by name and place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from relax_actors.traces.model import TraceError
from relax_actors.traces.plain import MAX_NUMBER, is_number

Array = NDArray[Any]
MAX_TOKEN = int(np.iinfo(np.int32).max)


def token_ids(record: Mapping[str, Any], name: str, where: str) -> Array:
    """Return a field's token ids, `[len] int32`; raises TraceError."""
    given = record.get(name)
    if given is None:
        msg = f"{where}: no {name}; a trace is trained by its token ids, and text alone does not give them back"
        raise TraceError(msg)
    if not isinstance(given, list) or any(type(i) is not int or not 0 <= i <= MAX_TOKEN for i in given):
        msg = f"{where}: {name} is {given!r:.60}; write a list of token ids, whole numbers of at least 0"
        raise TraceError(msg)
    return np.array(given, np.int32)


def logprobs(record: Mapping[str, Any], name: str, count: int, where: str) -> Array:
    """Return a field's finite log-probs, `[count] float32`; raises TraceError."""
    given = record.get(name)
    if given is None:
        msg = (
            f"{where}: no {name}; the loss compares with the log-probs that tokens were sampled with, so record them "
            "when the model answers"
        )
        raise TraceError(msg)
    if not isinstance(given, list) or not all(map(is_number, given)):
        msg = f"{where}: {name} is {given!r:.60}; write a list of numbers within the range of float32"
        raise TraceError(msg)
    if len(given) != count:
        msg = f"{where}: {name} has {len(given)} numbers for {count} tokens; write one for each token"
        raise TraceError(msg)
    with np.errstate(over="ignore"):
        numbers = np.array(given, np.float64).astype(np.float32)
    if not np.isfinite(numbers).all():
        msg = f"{where}: {name} has the value {given[int(np.argmin(np.isfinite(numbers)))]}; write finite numbers"
        raise TraceError(msg)
    return numbers


def number(value: Any, what: str, where: str) -> float | None:
    """Return a number, or None for none; raises TraceError if it is something else."""
    if value is None:
        return None
    if not is_number(value) or not abs(value) <= MAX_NUMBER:
        msg = f"{where}: {what} is {value!r:.60}; write a finite number"
        raise TraceError(msg)
    return float(np.float32(value))


def objects(record: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """Return a list's objects; raises TraceError if it is empty or holds others."""
    given = record.get(name)
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        msg = f"{where}: {name} is {given!r:.60}; write a list of objects, at least one"
        raise TraceError(msg)
    return given


def check_text(message: object, where: str) -> None:
    """Raise TraceError if the content of a message, a text or a list of parts, has a medium."""
    content = message.get("content") if isinstance(message, dict) else None
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and any(name in kind for name in ("image", "audio", "video")):
            refuse_media(f"content of type {kind!r:.40}", where)


def refuse_media(what: str, where: str) -> NoReturn:
    """Raise TraceError for a record with media, of which its format has no features."""
    msg = (
        f"{where}: it has media ({what}), whose features a trace lacks; train it by its own run, or leave the trace out"
    )
    raise TraceError(msg)
