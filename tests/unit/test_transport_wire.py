"""Wire format of the torch transport: round trips, and refusal of malformed messages."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_actors.weights.protocols import WeightPayload
from relax_actors.weights.transports.torch_transport import wire
from tests.unit.test_deltas import DTYPES, SEEDS, SHAPES, bits, random_bits

BASE = "0123456789abcdef" * 2


@settings(max_examples=25)
@given(SEEDS, st.integers(1, 4000), st.sampled_from([None, BASE]))
def test_tensors_round_trip(seed: int, chunk: int, base: str | None) -> None:
    source = np.random.default_rng(seed)
    tensors = {f"{dtype}.{shape}": random_bits(source, dtype, shape) for dtype in DTYPES for shape in SHAPES}
    sent = wire.Layout.of(WeightPayload(base, tensors))
    total = sum(tensor.nbytes for tensor in tensors.values())
    found = wire.Layout.parse(sent.header(), sent.nbytes, total)
    body = torch.empty(sent.nbytes, dtype=torch.uint8)
    for start in range(0, sent.nbytes, chunk):
        sent.fill(tensors, start, body[start : start + chunk])
    assert found.base == base
    received = found.views(body)
    assert list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert (received[name].dtype, received[name].shape, bits(received[name])) == (
            tensor.dtype,
            tensor.shape,
            bits(tensor),
        )
    with pytest.raises(ValueError, match="are offered"):
        wire.Layout.parse(sent.header(), sent.nbytes, total - 1)


def test_strided_tensors_are_sent_in_row_major_order() -> None:
    tensor = torch.arange(12).reshape(3, 4).t()
    layout = wire.Layout.of(WeightPayload(None, {"w": tensor}))
    body = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.fill({"w": tensor}, 0, body)
    assert torch.equal(layout.views(body)["w"], tensor)


def header(*tensors: object, base: object = None) -> bytes:
    return json.dumps({"base": base, "tensors": list(tensors)}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        b'{"tensors": []}',
        header(base="f" * 31),
        header(base=7),
        header("w"),
        header(["w", "float32"]),
        header(["w", "float32", [-1]]),
        header(["w", "float32", [1.5]]),
        header(["w", "float32", [True]]),
        header(["w", "float32", [1 << 41]]),
        header(["w", "float32", [1] * 17]),
        header(["w", "complex64", [1]]),
        header(["w", ["float32"], [1]]),
        header([7, "float32", [1]]),
        header(["w" * 2000, "float32", [1]]),
    ],
)
def test_malformed_header_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="are not a header of weights"):
        wire.Layout.parse(data, 4, 100)


def test_header_that_does_not_fit_its_body_is_refused() -> None:
    one = ["w", "float32", [1]]
    for data, body in ((header(one), 8), (header(one, one), 68), (header(["w", "float32", [1 << 39] * 16]), 4)):
        with pytest.raises(ValueError, match="the body has"):
            wire.Layout.parse(data, body, 100)


def test_requests_and_answers_are_parsed_strictly() -> None:
    assert wire.parse_request(wire.request(BASE, "")) == (BASE, "0" * 32)
    assert wire.parse_request(wire.request(BASE, BASE)) == (BASE, BASE)
    assert len(wire.request(BASE, "")) == wire.REQUEST
    for data in (b"\xff" * wire.REQUEST, b"x" * wire.REQUEST, b"0" * 63):
        with pytest.raises(ValueError, match=r"fingerprints|ascii"):
            wire.parse_request(data)
    assert wire.parse_answer(wire.answer(5, 1 << 50)) == (5, 1 << 50)
    with pytest.raises(ValueError, match="are allowed"):
        wire.parse_answer(wire.answer(wire.HEADER_BYTES + 1, 0))


def test_unsupported_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="complex64"):
        wire.Layout.of(WeightPayload(None, {"w": torch.zeros(1, dtype=torch.complex64)})).header()


def test_proof_depends_on_token_and_challenge() -> None:
    assert wire.proof("a", b"c") != wire.proof("b", b"c") != wire.proof("b", b"d")
    assert len(wire.proof("a", b"c")) == wire.PROOF
