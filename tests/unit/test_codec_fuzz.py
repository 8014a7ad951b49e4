"""Bytes that no encoder wrote decode to a message or raise CodecError."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.codec import (
    decode,
    encode,
    open_envelope,
    plain_value,
)
from broker.errors import CodecError
from tests.support.message_strategies import ANY_OTHER, OTHERS, PLAIN
from tests.unit.test_codec import body


def try_everything(data: bytes) -> None:
    """Decode the data or raise CodecError; any other exception fails the test."""
    for expected in OTHERS:
        with suppress(CodecError):
            decode(data, expected)
    with suppress(CodecError):
        plain_value(open_envelope(data, lambda reference: np.zeros(reference.shape if reference.nbytes < 99 else 0)))


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_codec_error(data: bytes) -> None:
    try_everything(data)


@given(st.sampled_from([c.__name__ for c in OTHERS] + ["value"]), PLAIN)
def test_any_fields_decode_or_raise_codec_error(name: str, fields: Any) -> None:
    try_everything(body(name, fields))


@given(PLAIN, st.sampled_from([1, 2, 3, -1]))
def test_any_extension_decodes_or_raises_codec_error(content: Any, code: int) -> None:
    try_everything(
        body("value", {"value": msgpack.ExtType(code, msgpack.packb(content))}) if code > 0 else b"\xd4\xff\0"
    )


@given(ANY_OTHER, st.data())
def test_truncated_cell_raises_codec_error(message: Any, data: st.DataObject) -> None:
    whole = encode(message, "a")
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(CodecError):
        open_envelope(cut)
    with pytest.raises(CodecError):
        open_envelope(whole + b"\0")


@given(ANY_OTHER, st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_cell_decodes_or_raises_codec_error(message: Any, changes: list[tuple[float, int]]) -> None:
    data = bytearray(encode(message, "a"))
    for place, byte in changes:
        data[int(place * len(data))] = byte
    try_everything(bytes(data))
