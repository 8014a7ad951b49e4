"""Cells round-trip exactly; all other bytes raise CodecError."""

from __future__ import annotations

import dataclasses
import pkgutil
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from typing_extensions import TypeAliasType

from broker.codec import (
    MAX_CELL_BYTES,
    decode,
    decode_fields,
    encode,
    open_envelope,
    plain_value,
)
from broker.errors import CodecError, StoreError
from broker.fields import TensorRef, decoder_of
from broker.schema import SCHEMA
from broker.store import Store
from broker.subjects import RowId
from relax_actors import messages
from tests.support.message_strategies import ANY_MESSAGE, ARRAYS, DTYPES, MESSAGES, PLAIN, Held

BATCH = messages.Batch([3, 1], 5, 1, 0.5, 0, 12, 1e9)


def same(a: Any, b: Any) -> bool:
    """Compare types and bits; NaN equals NaN."""
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return isinstance(b, float) and np.float64(a).tobytes() == np.float64(b).tobytes()
    return type(b) is type(a) or isinstance(a, str) if a == b else False


def body(name: str, fields: Any, schema: Any = SCHEMA, author: Any = "a.0#1") -> bytes:
    return typing.cast("bytes", msgpack.packb([schema, name, author, fields]))


def extension(code: int, *content: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb(list(content)))


def test_samples_cover_every_message_type() -> None:
    views = {messages.Sample, messages.TokenSequence}
    modules = [import_module(f"{messages.__name__}.{found.name}") for found in pkgutil.iter_modules(messages.__path__)]
    given = {
        name: value for module in modules for name, value in vars(module).items() if dataclasses.is_dataclass(value)
    }
    message_types = {value for name, value in given.items() if getattr(messages, name, None) is value} - views
    assert message_types == set(MESSAGES)


@given(ANY_MESSAGE)
def test_message_round_trips_bit_for_bit(message: Any) -> None:
    assert same(message, decode(encode(message, "role.0#1"), type(message)))


@given(PLAIN)
def test_plain_data_round_trips(value: Any) -> None:
    assert same(value, plain_value(open_envelope(encode(value, "role.0#1"))))


@given(ARRAYS)
def test_array_round_trips_with_dtype_shape_and_bits(array: np.ndarray) -> None:
    assert same(array, plain_value(open_envelope(encode(array, "a"))))
    assert same([array], plain_value(open_envelope(encode([array], "a"))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3), (0, 0, 2)])
def test_dtype_and_shape_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    assert same(array, plain_value(open_envelope(encode(array, "a"))))


@pytest.mark.parametrize(
    "array", [np.arange(12).reshape(3, 4).T, np.arange(10)[::-3], np.arange(24).reshape(2, 3, 4)[:, 1]]
)
def test_non_contiguous_view_round_trips(array: np.ndarray) -> None:
    found = plain_value(open_envelope(encode(array, "a")))
    assert np.array_equal(found, array)
    assert found.shape == array.shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(20_000,), (200, 101), (5, 1, 4001)])
def test_large_array_round_trips_by_reference(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    store = Store(tmp_path)
    array = (np.arange(np.prod(shape)) % 101).astype(dtype).reshape(shape)
    segment = store.segment_writer(RowId(1, 2), "reward", "a.0#1")
    data = encode(Held(array), "a", segment.place)
    if segment.close():
        assert len(data) < 400
    assert same(array, decode(data, Held, store.read).values)


def test_cell_may_mix_small_and_large_arrays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    value = {"big": np.arange(9001.0), "small": np.arange(3), "more": [np.ones((100, 70), np.float32), None]}
    segment = store.segment_writer(RowId(0, 0), "own", "a.0#1")
    data = encode(value, "a", segment.place)
    assert segment.close()
    assert same(value, plain_value(open_envelope(data, store.read)))


def test_reference_without_a_store_decodes_as_a_reference_only(tmp_path: Path) -> None:
    segment = Store(tmp_path).segment_writer(RowId(0, 0), "reward", "a.0#1")
    data = encode(Held(np.zeros(9000)), "a", segment.place)
    reference = open_envelope(data).fields["values"]
    assert isinstance(reference, TensorRef)
    assert reference.shape == (9000,)
    with pytest.raises(CodecError, match=r"Held\.values is of type TensorRef, expected ndarray"):
        decode(data, Held)


def test_kept_reference_is_not_read_when_the_cell_is(tmp_path: Path) -> None:
    """Only roles that compute with a row's media read them, and each of them once."""
    kept = TensorRef("gone", 0, 8, "float64", (1,), "0")
    medium = messages.Media("audio", 0, kept, np.ones(1, np.int32), 0, 1)
    assert decode(encode(medium, "a"), messages.Media, Store(tmp_path).read).features == kept


def test_missing_segment_raises_store_error(tmp_path: Path) -> None:
    store = Store(tmp_path)
    segment = store.segment_writer(RowId(0, 0), "reward", "a.0#1")
    data = encode(Held(np.zeros(9000)), "a", segment.place)
    with pytest.raises(StoreError, match="missing"):
        open_envelope(data, store.read)


def test_numpy_scalars_and_enums_are_encoded_as_plain_data() -> None:
    value = [np.float32(0.5), np.int64(7), np.bool_(True), messages.FinishReason.STOP, (1, 2)]
    assert plain_value(open_envelope(encode(value, "a"))) == [0.5, 7, True, "stop", [1, 2]]


def test_envelope_contains_type_and_author() -> None:
    envelope = open_envelope(encode(BATCH, "trainer.0#4"))
    assert (envelope.type, envelope.author) == ("Batch", "trainer.0#4")


def test_decoded_arrays_are_read_only() -> None:
    found = plain_value(open_envelope(encode(np.arange(3), "a")))
    assert not found.flags.writeable


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, 1j, np.array(["x"]), np.array([1j]), np.array([None]), np.datetime64(0, "s"), 2**64, Path()],
)
def test_value_without_an_encoding_is_refused(value: Any) -> None:
    with pytest.raises(CodecError):
        encode(value, "a")


def test_self_referential_value_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CodecError, match="nested deeper"):
        encode(endless, "a")


def test_cell_over_the_limit_is_refused_by_encoder_and_decoder() -> None:
    with pytest.raises(CodecError, match="pass large data as arrays"):
        encode("x" * MAX_CELL_BYTES, "a")
    with pytest.raises(CodecError, match="over the limit"):
        open_envelope(b"\0" * (MAX_CELL_BYTES + 1))


def test_cell_just_below_the_limit_is_accepted() -> None:
    text = "x" * (MAX_CELL_BYTES - 64)
    assert plain_value(open_envelope(encode(text, "a"))) == text


def test_unknown_and_missing_fields_are_named() -> None:
    with pytest.raises(CodecError, match=r"Dropped: missing fields \['detail'\], unknown fields \['why'\]"):
        decode(body("Dropped", {"reason": "x", "why": "y"}), messages.Dropped)
    with pytest.raises(CodecError, match=r"Shard\[?.*missing fields|Weights.shards\[0\]: missing fields"):
        decode(
            body("Weights", {"version": 1, "fingerprint": "", "shards": [{}], "incarnation": 1, "base_version": None}),
            messages.Weights,
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 3}, r"Batch\.rows is of type int, expected list"),
        ({"rows": ["x"]}, r"Batch\.rows\[0\] is of type str, expected int"),
        ({"rows": [True]}, r"Batch\.rows\[0\] is of type bool, expected int"),
        ({"rows": [1.0]}, r"Batch\.rows\[0\] is of type float, expected int"),
        ({"seed": None}, r"Batch\.seed is of type NoneType, expected int"),
        ({"reward": "0.5"}, r"Batch\.reward is of type str, expected float"),
        ({"reward": True}, r"Batch\.reward is of type bool, expected float"),
    ],
)
def test_value_of_the_wrong_type_is_named(fields: dict[str, Any], message: str) -> None:
    plain = {f.name: getattr(BATCH, f.name) for f in dataclasses.fields(BATCH)}
    with pytest.raises(CodecError, match=message):
        decode(body("Batch", plain | fields), messages.Batch)


def test_integer_is_accepted_as_a_float() -> None:
    plain = {f.name: getattr(BATCH, f.name) for f in dataclasses.fields(BATCH)} | {"reward": 1}
    assert decode(body("Batch", plain), messages.Batch).reward == 1.0


def test_other_type_or_schema_is_refused_with_the_remedy() -> None:
    with pytest.raises(CodecError, match="cell holds a Dropped, expected a Batch"):
        decode(encode(messages.Dropped("", ""), "a"), messages.Batch)
    with pytest.raises(CodecError, match="schema 1, this version reads schema 3"):
        open_envelope(body("Dropped", {}, schema=1))
    with pytest.raises(CodecError, match="expected plain data"):
        plain_value(open_envelope(encode(BATCH, "a")))
    with pytest.raises(CodecError, match="cell holds a value, expected a Batch"):
        decode_fields(open_envelope(encode(1, "a")), messages.Batch)


@pytest.mark.parametrize(
    "cell", [None, [], [1, "a", "b"], [1, "a", "b", {}, 0], ["1", "a", "b", {}], [1, 2, "b", {}], [1, "a", "b", []], {}]
)
def test_data_that_is_not_a_cell_is_refused(cell: Any) -> None:
    with pytest.raises(CodecError, match="not a cell"):
        open_envelope(msgpack.packb(cell))


@pytest.mark.parametrize(
    "value",
    [
        msgpack.ExtType(7, b""),
        msgpack.ExtType(1, b""),
        msgpack.ExtType(1, b"\xc1"),
        msgpack.ExtType(2, b"\x93"),
        extension(1),
        extension(1, "float32", [2], b"1234"),
        extension(1, "object", [1], b"12345678"),
        extension(1, "O", [1], b"12345678"),
        extension(1, ["i4", "f4"], [1], b"12345678"),
        extension(1, "uint8", [-1], b""),
        extension(1, "uint8", [True], b"1"),
        extension(1, "uint8", 1, b"1"),
        extension(1, "uint8", [1] * 9, b"1"),
        extension(1, "uint8", [2**63, 2**63, 0], b""),
        extension(1, "uint8", [2**64 - 1, 0], b""),
        extension(1, "uint8", [1], "1"),
        extension(1, extension(1, "uint8", [1], b"1"), [1], b"1"),
        extension(2, "uri", -1, 1, "uint8", [1], ""),
        extension(2, "uri", 0, 2, "uint8", [1], ""),
        extension(2, "uri", 0, 2**60, "uint8", [2**60], ""),
        extension(2, b"uri", 0, 1, "uint8", [1], ""),
        extension(2, "uri", 0, 1, "uint8", [1]),
        extension(2, "uri", 0, 1, "uint8", [1], extension(2)),
        extension(3, "uri", -1, 1, "uint8", [1], ""),
        extension(3, "uri", 0, 2, "uint8", [1], ""),
    ],
)
def test_malformed_extension_is_refused(value: msgpack.ExtType) -> None:
    with pytest.raises(CodecError):
        open_envelope(body("value", {"value": value}), lambda _: np.zeros(1))


def test_too_deeply_nested_data_is_refused() -> None:
    for depth in (5000, 100_000):
        with pytest.raises(CodecError):
            open_envelope(b"\x94\x01\xa1a\xa1b\x81\xa1v" + b"\x91" * depth + b"\xc0")


def test_trajectory_with_inconsistent_arrays_is_refused() -> None:
    good = messages.Trajectory(
        prompt_tokens=np.zeros(2, np.int32),
        lengths=np.array([1, 2], np.int32),
        token_ids=np.arange(3, dtype=np.int32),
        logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
        texts=["a", "b"],
        finish_reasons=["stop", "length"],
        fingerprints=["f"],
    )
    plain = {f.name: getattr(good, f.name) for f in dataclasses.fields(good)}
    for change in (
        {"token_ids": np.arange(4, dtype=np.int32)},
        {"logprobs": np.zeros(2, np.float32)},
        {"versions": np.zeros(0, np.int32)},
        {"lengths": np.array([-1, 4], np.int32)},
        {"lengths": np.array([3], np.int32)},
        {"texts": ["a"]},
        {"fingerprints": ["f", "g"]},
        {"finish_reasons": []},
    ):
        fields = {k: encode_array(v) if isinstance(v, np.ndarray) else v for k, v in (plain | change).items()}
        with pytest.raises(CodecError, match=r"Trajectory: .*(do not hold|differ in number|lengths|fingerprints)"):
            decode(body("Trajectory", fields), messages.Trajectory)


def encode_array(array: np.ndarray) -> msgpack.ExtType:
    return extension(1, array.dtype.name, list(array.shape), array.tobytes())


def test_an_alias_of_a_type_decodes_as_what_it_stands_for() -> None:
    # From NumPy 2.5 and Python 3.12 on, NDArray is such an alias.
    name = typing.TypeVar("name")
    alias = TypeAliasType("alias", np.ndarray[Any, np.dtype[name]], type_params=(name,))
    assert decoder_of(alias[np.float32])(array := np.zeros(3), "values") is array
    with pytest.raises(CodecError, match="expected ndarray"):
        decoder_of(alias[np.float32])([0.0], "values")
