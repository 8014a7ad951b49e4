"""Small messages that would take much memory or time to decode are refused within bounds of both."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.codec import MAX_ARRAY_BYTES, MAX_CELL_BYTES, MAX_ITEMS, encode, open_envelope, plain_value
from broker.errors import CodecError, StoreError
from broker.items import check_items
from broker.schema import SCHEMA
from relax_actors.messages import Trajectory
from relax_actors.weights import files
from tests.support.messages import assert_says

MIB, SECONDS = 64, 3.0
"""Bounds of one message of 4 MiB: MiB that Python allocates, and seconds of CPU on a slow machine."""
HEAD = (
    b"\x94"
    + msgpack.packb(SCHEMA)
    + msgpack.packb("value")
    + msgpack.packb("rollout.0#1")
    + b"\x81"
    + msgpack.packb("value")
)
ROOM = MAX_CELL_BYTES - 64


def assert_bounded(work: Callable[[], object]) -> None:
    """Run a function for its time, and again for the memory that Python allocates, which takes longer."""
    began = time.process_time()
    work()
    assert time.process_time() - began < SECONDS
    tracemalloc.start()
    try:
        work()
        assert tracemalloc.get_traced_memory()[1] >> 20 < MIB
    finally:
        tracemalloc.stop()


def refusal(work: Callable[[], object], error: type[Exception]) -> str:
    """Return the message of the error with which a function ends within bounds."""
    messages = []

    def attempt() -> None:
        with pytest.raises(error) as refused:
            work()
        messages.append(str(refused.value))

    assert_bounded(attempt)
    return messages[0]


def listed(count: int, body: bytes) -> bytes:
    """A cell whose value is a list of `count` items."""
    return bytes(HEAD + b"\xdd" + count.to_bytes(4, "big") + body)


def extension(code: int, payload: bytes) -> bytes:
    return b"\xc9" + len(payload).to_bytes(4, "big") + bytes([code]) + payload


BOMBS = {
    "empty lists": listed(ROOM, b"\x90" * ROOM),
    "empty maps": listed(ROOM, b"\x80" * ROOM),
    "empty texts": listed(ROOM, b"\xa0" * ROOM),
    "numbers": listed(ROOM // 3, b"\xcd\xff\xff" * (ROOM // 3)),
    "lists of lists": listed(ROOM // 8, (b"\x97" + b"\x90" * 7) * (ROOM // 8)),
    "nested lists": HEAD + b"\x91" * ROOM,
    "a list that ends early": listed(0xFFFFFFFF, b"\x90" * ROOM),
    "a map that ends early": HEAD + b"\xdf\xff\xff\xff\xff" + b"\xa1a\x90" * (ROOM // 3),
    "a text that ends early": HEAD + b"\xdb\xff\xff\xff\xff" + b"a" * ROOM,
    "lists in a shape": HEAD + extension(1, b"\x93\xa4bool\xdd" + ROOM.to_bytes(4, "big") + b"\x90" * (ROOM - 64)),
    "lists in a reference": HEAD + extension(2, b"\x96\xdd" + ROOM.to_bytes(4, "big") + b"\x90" * (ROOM - 64)),
    "small arrays": listed(ROOM // 20, extension(1, msgpack.packb(["bool", [1], b"1"])) * (ROOM // 20)),
    "short extensions": listed(ROOM // 3, b"\xd4\x05\x00" * (ROOM // 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_a_cell_is_refused_within_bounds(name: str) -> None:
    assert refusal(lambda: plain_value(open_envelope(BOMBS[name][:MAX_CELL_BYTES])), CodecError)


def test_the_refusal_names_the_limit_and_the_remedy() -> None:
    with pytest.raises(CodecError) as refused:
        open_envelope(BOMBS["empty lists"])
    assert_says(refused.value, MAX_ITEMS, "as arrays")
    with pytest.raises(CodecError) as unwritable:
        encode([0] * MAX_ITEMS, "shaped.0#1")
    assert str(unwritable.value) == str(refused.value)


def test_the_largest_cell_that_can_be_written_can_be_read_within_bounds() -> None:
    data = encode([1.5] * (MAX_ITEMS - 8), "shaped.0#1")
    assert len(plain_value(open_envelope(data))) == MAX_ITEMS - 8
    assert_bounded(lambda: open_envelope(data))


PLAIN = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
)  # fmt: skip


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + count(item) for item in value.values())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


@settings(max_examples=40)
@given(PLAIN)
def test_items_are_counted_at_every_depth(value: Any) -> None:
    data, items = msgpack.packb(value), count(value)
    check_items(data, items)
    with pytest.raises(CodecError):
        check_items(data, items - 1)


@given(st.binary(max_size=200))
def test_counting_ends_for_any_bytes(data: bytes) -> None:
    check_items(data, 1 << 40)


def test_references_to_more_bytes_than_one_array_may_have_are_refused() -> None:
    half = MAX_ARRAY_BYTES // 2 + 1
    reference = extension(2, msgpack.packb(["group/0/a", 0, half, "bool", [half], "0" * 32]))
    reads = []
    with pytest.raises(CodecError) as refused:
        open_envelope(listed(2, reference * 2), lambda found: reads.append(found) or np.zeros(1))  # type: ignore[func-returns-value]
    assert_says(refused.value, f"{MAX_ARRAY_BYTES} bytes")
    assert len(reads) == 1


def trajectory(prompt: int, sequences: int) -> Callable[[], Trajectory]:
    return lambda: Trajectory(
        prompt_tokens=np.zeros(prompt, np.int32),
        lengths=np.array([1] + [0] * (sequences - 1), np.int32),
        token_ids=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32),
        versions=np.zeros(1, np.int32),
        texts=["1"],
        finish_reasons=["stop"],
        sequence_counts=np.array([sequences], np.int32),
    )


@pytest.mark.parametrize(
    ("prompt", "sequences", "expected"),
    [
        (1, 1 << 20, "a trajectory has 1048576 sequences, more than 65536"),
        (
            1 << 20,
            1 << 10,
            "the sequences of a trajectory have 1073741825 tokens with their prompts, more than 67108864",
        ),
    ],
)  # fmt: skip
def test_a_trajectory_that_unfolds_to_much_more_than_it_holds_is_refused(
    prompt: int, sequences: int, expected: str
) -> None:
    assert refusal(trajectory(prompt, sequences), ValueError) == expected


def test_a_weight_file_with_a_huge_header_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "1.1.safetensors"
    length = files.MAX_HEADER_BYTES + 8
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + b"{")
        file.truncate(length + 8)
    found = refusal(lambda: files.load([path]), StoreError)
    limit = f"its header of {length} bytes is over the limit of {files.MAX_HEADER_BYTES}"
    assert found == f"weights shard {path} cannot be read: {limit}"
