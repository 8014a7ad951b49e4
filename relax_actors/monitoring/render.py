"""Messages and cells as text."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np

from broker.codec import Envelope, open_envelope
from broker.fields import TensorRef
from relax_actors.errors import CodecError

SHOWN = 8
"""Elements of an array that are printed."""


def readable(data: bytes) -> str:
    """Format a message as one line: JSON as it is; a cell as its type, author and fields."""
    if data[:1] in (b"{", b"["):
        with suppress(ValueError, RecursionError):
            return json.dumps(json.loads(data), ensure_ascii=False)
    try:
        envelope = open_envelope(data)
    except CodecError as error:
        return f"({len(data)} bytes: {error})"
    return f"{envelope.type} by {envelope.author} {_line(envelope)}"


def fields_of(data: bytes) -> str:
    """Format the fields of a cell as one line of JSON; of data that does not decode, the reason."""
    try:
        return _line(open_envelope(data))
    except CodecError as error:
        return f"({len(data)} bytes: {error})"


def _line(envelope: Envelope) -> str:
    fields = {name: _plain(value) for name, value in envelope.fields.items()}
    shown = {"Prompt": source_line, "PreparedPrompt": _features}.get(envelope.type)
    if shown is not None and isinstance(media := envelope.fields.get("media"), list):
        fields["media"] = [shown(medium) if isinstance(medium, dict) else _plain(medium) for medium in media]
    return json.dumps(fields, ensure_ascii=False)


def source_line(medium: dict[str, Any]) -> str:
    """Return kind, size, part and place of a medium of a prompt."""
    size, part = medium.get("size"), [medium.get(name) for name in ("start", "end")]
    begin, end = ("" if at is None else f"{at} s" for at in part)
    seconds = f", {begin or '0 s'} to {end or 'its end'}" if begin or end else ""
    copy = " (copy in the store)" if medium.get("stored") else ""
    bytes_ = f", {size} bytes" if size else ""
    return f"{medium.get('kind')}{bytes_}{seconds}, {medium.get('url') or medium.get('path')}{copy}"


def _features(medium: dict[str, Any]) -> str:
    """Kind, duration, size and place of the features of a medium."""
    sound = " of the video" if medium.get("inside") else ""
    seconds = f", {round(medium['seconds'], 2)} s" if isinstance(medium.get("seconds"), float) else ""
    grid = medium.get("grid")
    sizes = grid.reshape(-1)[:3].tolist() if isinstance(grid, np.ndarray) else ["?"]
    size, unit = "x".join(map(str, sizes)), "frames" if len(sizes) == 1 else "patches"
    return (
        f"{medium.get('kind')}{sound}{seconds}, {size} {unit}, {medium.get('tokens')} tokens, "
        f"{_plain(medium.get('features'))}"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1)
        shown = [x.item() for x in flat[:SHOWN]] + (["..."] if flat.size > SHOWN else [])
        return f"{value.dtype}{list(value.shape)} {shown}"
    if isinstance(value, TensorRef):
        return f"{value.dtype}{list(value.shape)} in {value.uri}"
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value.hex() if isinstance(value, bytes) else value
