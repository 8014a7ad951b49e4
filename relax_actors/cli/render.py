"""Messages as text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from broker.codec import TensorRef, open_envelope
from relax_actors.errors import CodecError

SHOWN = 8


def readable(data: bytes) -> str:
    """A message as one line: JSON as it is, a cell as its type, author and fields."""
    if data[:1] in (b"{", b"["):
        try:
            return json.dumps(json.loads(data), ensure_ascii=False)
        except ValueError:
            pass
    try:
        envelope = open_envelope(data)
    except CodecError as error:
        return f"({len(data)} bytes: {error})"
    return f"{envelope.type} by {envelope.author} {fields_of(data)}"


def fields_of(data: bytes) -> str:
    """The fields of a cell as one line of JSON."""
    fields = {name: _plain(value) for name, value in open_envelope(data).fields.items()}
    return json.dumps(fields, ensure_ascii=False)


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
