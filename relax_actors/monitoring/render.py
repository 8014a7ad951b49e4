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
    return json.dumps({name: _plain(value) for name, value in envelope.fields.items()}, ensure_ascii=False)


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
