"""Values between tests and a program: a line of JSON, with handles of objects.

Part of both scripts that run in the sandboxes. What arrives is built of plain types alone, so no method of the program
runs among the tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

LONGEST = 1 << 22
"""Bytes of a line at most."""


COLLECTIONS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def packed(value: Any, handle: Callable[[Any], int]) -> Any:
    """Return a value as JSON types; `handle` numbers an object that is none of the plain types."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": repr(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in COLLECTIONS.values():
        return {kind.__name__: [packed(item, handle) for item in value]}
    if kind is dict:
        return {"dict": [[packed(key, handle), packed(item, handle)] for key, item in value.items()]}
    return {"object": handle(value)}


def unpacked(body: Any, held: Callable[[int], Any]) -> Any:
    """Return the value of `packed`, or raise; `held` returns an object by number."""
    if body is None or isinstance(body, (bool, int, str)):
        return body
    ((kind, item),) = body.items()
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](unpacked(part, held) for part in item)
    if kind == "dict":
        return {unpacked(key, held): unpacked(part, held) for key, part in item}
    readers: dict[str, Callable[[Any], Any]] = {"float": float, "bytes": bytes.fromhex, "object": held}
    return readers[kind](item)


class Channel:
    """Two pipes to the other sandbox."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest = read, write, b""

    def send(self, body: Any) -> None:
        """Send JSON types."""
        data = json.dumps(body).encode() + b"\n"
        while data:
            data = data[os.write(self._write, data) :]

    def receive(self) -> Any:
        """Receive JSON types; raises EOFError at the other side's end, or a long line."""
        while b"\n" not in self._rest:
            data = os.read(self._read, 1 << 16)
            self._rest += data
            if not data or len(self._rest) > LONGEST:
                message = "the program has ended"
                raise EOFError(message)
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)
