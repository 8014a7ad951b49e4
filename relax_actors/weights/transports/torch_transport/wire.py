"""Messages over a pair: bytes of fixed or bounded length, parsed strictly. No pickle.

    sender     CHALLENGE random bytes
    receiver   PROOF     HMAC-SHA256 of them under the token; otherwise the sender sends nothing more
    receiver   REQUEST   wanted fingerprint, fingerprint of the base that the receiver has (zeros: none)
    sender     ANSWER    lengths of header and body as two uint64; zeros: it does not hold those weights
    sender     header    JSON {"base": fingerprint or null, "tensors": [[name, dtype, shape], ...]}
    sender     body      tensors, each at a multiple of 64 bytes; a byte before each CHUNK: 1, or 0 if the version was
                         replaced meanwhile, which ends the body

The connection then continues with the next request.
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

from relax_actors.weights.protocols import WeightPayload

CHALLENGE, PROOF, REQUEST, ANSWER = 32, 32, 64, 16
CHUNK = 8 << 20
CHUNK_FOLLOWS, RELEASED = b"\1", b"\0"
HEADER_BYTES = 64 << 20
_ALIGN = 64
_MAX_TENSORS, _MAX_NAME, _MAX_DIMENSIONS = 1 << 20, 1024, 16
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def proof(token: str, challenge: bytes) -> bytes:
    """Return the answer to a challenge, which needs the token."""
    return hmac.new(token.encode(), challenge, hashlib.sha256).digest()


def request(wanted: str, base: str) -> bytes:
    """Return REQUEST bytes; `base` may be empty."""
    return wanted.encode() + base.encode().ljust(REQUEST // 2, b"0")


def parse_request(data: bytes) -> tuple[str, str]:
    """Return the wanted fingerprint and the base, which is all zeros for none.

    Raises:
        ValueError: they are not two fingerprints.
    """
    text = data.decode("ascii")
    wanted, base = text[: REQUEST // 2], text[REQUEST // 2 :]
    if not _FINGERPRINT.fullmatch(wanted) or not _FINGERPRINT.fullmatch(base):
        msg = f"request {text!r} is not two fingerprints"
        raise ValueError(msg)
    return wanted, base


def answer(header: int, body: int) -> bytes:
    """Return ANSWER bytes for the lengths of header and body."""
    return header.to_bytes(8, "little") + body.to_bytes(8, "little")


def parse_answer(data: bytes) -> tuple[int, int]:
    """Return the lengths of header and body.

    Raises:
        ValueError: the header is longer than HEADER_BYTES.
    """
    header, body = int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")
    if header > HEADER_BYTES:
        msg = f"a header has {header} bytes; {HEADER_BYTES} are allowed"
        raise ValueError(msg)
    return header, body


@dataclass(frozen=True, slots=True)
class Entry:
    """Type and place of a tensor in the body."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """Order and places of the tensors in a body."""

    def __init__(self, base: str | None, kinds: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        self.base = base
        self.entries: list[Entry] = []
        self.nbytes = 0
        for name, dtype, shape in kinds:
            entry = Entry(name, dtype, shape, -(-self.nbytes // _ALIGN) * _ALIGN)
            self.entries.append(entry)
            self.nbytes = entry.start + entry.nbytes

    @classmethod
    def of(cls, payload: WeightPayload) -> Layout:
        """Return the layout of a payload to send."""
        return cls(payload.base, [(name, t.dtype, tuple(t.shape)) for name, t in payload.tensors.items()])

    def header(self) -> bytes:
        """Return the header bytes.

        Raises:
            ValueError: the dtype of a tensor cannot be sent, or there are too many tensors.
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
    def parse(cls, header: bytes, body: int, max_bytes: int) -> Layout:
        """Parse a received header.

        Args:
            header: bytes.
            body: length of the body in bytes.
            max_bytes: limit on the total size of the tensors.

        Raises:
            ValueError: the header is malformed, does not fit the body, or exceeds the limit.
        """
        try:
            tree: Any = json.loads(header) if len(header) <= HEADER_BYTES else None
            base, tensors = tree["base"], tree["tensors"]
            is_valid = (base is None or (isinstance(base, str) and _FINGERPRINT.fullmatch(base))) and isinstance(
                tensors, list
            )
            if not is_valid or len(tensors) > _MAX_TENSORS:
                raise ValueError  # noqa: TRY301 reported below like every other malformed header
            kinds = [_kind(entry) for entry in tensors]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            msg = f"{len(header)} bytes are not a header of weights"
            raise ValueError(msg) from error
        layout = cls(base, kinds)
        if len({e.name for e in layout.entries}) != len(kinds) or layout.nbytes != body:
            msg = f"a header names tensors of {layout.nbytes} bytes, or a tensor twice; the body has {body} bytes"
            raise ValueError(msg)
        if (total := sum(e.nbytes for e in layout.entries)) > max_bytes:
            msg = f"{total} bytes of tensors are offered; the published weights have {max_bytes}"
            raise ValueError(msg)
        return layout

    def views(self, body: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of a body, `[nbytes] uint8` on the CPU."""
        return {e.name: body[e.start : e.start + e.nbytes].view(e.dtype).reshape(e.shape) for e in self.entries}

    def fill(self, tensors: Mapping[str, Tensor], start: int, chunk: Tensor) -> None:
        """Copy the bytes of the body from offset `start` into a chunk, `[n] uint8` on the CPU."""
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
    if (
        not isinstance(name, str)
        or len(name) > _MAX_NAME
        or not isinstance(shape, list)
        or len(shape) > _MAX_DIMENSIONS
    ):
        raise ValueError
    if any(type(n) is not int or not 0 <= n < 1 << 40 for n in shape):
        raise ValueError
    return name, _DTYPES[dtype], tuple(shape)
