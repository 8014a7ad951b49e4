"""What goes over a pair: bytes of fixed or bounded length, parsed strictly. No pickle.

    sender     CHALLENGE random bytes
    receiver   PROOF     HMAC-SHA256 of them under the token; else the sender says nothing more
    receiver   REQUEST   fingerprint wanted, fingerprint of what is here already (zeros: nothing)
    sender     ANSWER    lengths of header and body as two uint64; zeros: it does not have that
    sender     header    JSON {"base": fingerprint or null, "tensors": [[name, dtype, shape], ...]}
    sender     body      tensors, each at a multiple of 64 bytes; before each CHUNK a byte: 1, or 0 if that version was
                         let go meanwhile, and there is no more of it

A connection then goes on with the next request.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax_actors.weights.protocol import Content

CHALLENGE, PROOF, REQUEST, ANSWER = 32, 32, 64, 16
CHUNK = 8 << 20
GOES_ON, LET_GO = b"\1", b"\0"
HEADER_BYTES = 64 << 20
_ALIGN = 64
_TENSORS, _NAME, _DIMENSIONS = 1 << 20, 1024, 16
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def proof(token: str, challenge: bytes) -> bytes:
    """What only one who has the token can answer to a challenge."""
    return hmac.new(token.encode(), challenge, hashlib.sha256).digest()


def request(wanted: str, here: str) -> bytes:
    """REQUEST bytes; `here` may be empty."""
    return wanted.encode() + here.encode().ljust(REQUEST // 2, b"0")


def parse_request(data: bytes) -> tuple[str, str]:
    """Fingerprints wanted, and here; the latter may be one that nothing has.

    Raises:
        ValueError: they are none.
    """
    text = data.decode("ascii")
    wanted, here = text[: REQUEST // 2], text[REQUEST // 2 :]
    if not _FINGERPRINT.fullmatch(wanted) or not _FINGERPRINT.fullmatch(here):
        msg = f"a request for {text!r}, which are no two fingerprints"
        raise ValueError(msg)
    return wanted, here


def answer(header: int, body: int) -> bytes:
    """ANSWER bytes."""
    return header.to_bytes(8, "little") + body.to_bytes(8, "little")


def parse_answer(data: bytes) -> tuple[int, int]:
    """Lengths of header and body.

    Raises:
        ValueError: the header is longer than any.
    """
    header, body = int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")
    if header > HEADER_BYTES:
        msg = f"a header of {header} bytes, {HEADER_BYTES} are allowed"
        raise ValueError(msg)
    return header, body


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies in the body."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Its length."""
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """The order and places of tensors in a body."""

    def __init__(self, base: str | None, kinds: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        self.base = base
        self.entries: list[Entry] = []
        self.nbytes = 0
        for name, dtype, shape in kinds:
            entry = Entry(name, dtype, shape, -(-self.nbytes // _ALIGN) * _ALIGN)
            self.entries.append(entry)
            self.nbytes = entry.start + entry.nbytes

    @classmethod
    def of(cls, content: Content) -> Layout:
        """Of what is to be sent."""
        return cls(content.base, [(name, t.dtype, tuple(t.shape)) for name, t in content.tensors.items()])

    def header(self) -> bytes:
        """Header bytes.

        Raises:
            ValueError: a tensor cannot be sent, or there are too many.
        """
        names = {dtype: name for name, dtype in _DTYPES.items()}
        if unknown := {str(e.dtype) for e in self.entries} - {str(dtype) for dtype in names}:
            msg = f"tensors of {sorted(unknown)} cannot be sent"
            raise ValueError(msg)
        tensors = [[e.name, names[e.dtype], list(e.shape)] for e in self.entries]
        data = json.dumps({"base": self.base, "tensors": tensors}).encode()
        self.parse(data, self.nbytes, self.nbytes)
        return data

    @classmethod
    def parse(cls, header: bytes, body: int, most: int) -> Layout:
        """Of a header and the length of its body, whose tensors may have `most` bytes together.

        Raises:
            ValueError: it is not well formed, or names more.
        """
        try:
            tree: Any = json.loads(header) if len(header) <= HEADER_BYTES else None
            base, tensors = tree["base"], tree["tensors"]
            good = (base is None or (isinstance(base, str) and _FINGERPRINT.fullmatch(base))) and isinstance(
                tensors, list
            )
            if not good or len(tensors) > _TENSORS:
                raise ValueError  # noqa: TRY301 told with all that is no header
            kinds = [_kind(entry) for entry in tensors]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            msg = f"{len(header)} bytes are no header of weights"
            raise ValueError(msg) from error
        layout = cls(base, kinds)
        if len({e.name for e in layout.entries}) != len(kinds) or layout.nbytes != body:
            msg = f"a header names tensors of {layout.nbytes} bytes or one twice, the body has {body}"
            raise ValueError(msg)
        if (total := sum(e.nbytes for e in layout.entries)) > most:
            msg = f"{total} bytes of tensors are on offer, the published weights have {most}"
            raise ValueError(msg)
        return layout

    def views(self, body: Tensor) -> dict[str, Tensor]:
        """The tensors as views of a body, `[nbytes] uint8` on the CPU."""
        return {e.name: body[e.start : e.start + e.nbytes].view(e.dtype).reshape(e.shape) for e in self.entries}

    def fill(self, tensors: Mapping[str, Tensor], start: int, chunk: Tensor) -> None:
        """Copy the bytes of the body from `start` on into a chunk, `[n] uint8` on the CPU."""
        end = start + len(chunk)
        for e in self.entries[max(0, bisect_right(self.entries, start, key=lambda e: e.start) - 1) :]:
            if e.start >= end:
                break
            first, last = max(start, e.start), min(end, e.start + e.nbytes)
            if first < last:
                flat = tensors[e.name].contiguous().reshape(-1).view(torch.uint8)
                chunk[first - start : last - start].copy_(flat[first - e.start : last - e.start])


def _kind(entry: object) -> tuple[str, torch.dtype, tuple[int, ...]]:
    if not isinstance(entry, list):
        raise TypeError
    name, dtype, shape = entry
    if not isinstance(name, str) or len(name) > _NAME or not isinstance(shape, list) or len(shape) > _DIMENSIONS:
        raise ValueError
    if any(type(n) is not int or not 0 <= n < 1 << 40 for n in shape):
        raise ValueError
    return name, _DTYPES[dtype], tuple(shape)
