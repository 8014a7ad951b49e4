"""Cells round-trip exactly; all other bytes raise CodecError."""

from __future__ import annotations

import dataclasses
import pkgutil
import typing
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
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
from relax_actors.messages.cells import SetResult

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
ARRAYS = arrays.arrays(st.sampled_from(DTYPES), arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
INTEGERS = st.integers(-(2**63), 2**64 - 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ROW_COUNTS = st.builds(messages.RowCounts, *[st.integers(0, 2**62)] * 4)
SHARDS = st.builds(messages.Shard, st.text(), INTEGERS, st.text())


@st.composite
def trajectories(draw: st.DrawFn) -> messages.Trajectory:
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any))
    total = sum(lengths)
    prompt = draw(arrays.arrays(np.int32, st.integers(1, 5)))
    versions = draw(arrays.arrays(np.int32, total, elements=st.integers(0, 9)))
    count = len(np.unique(versions))
    return messages.Trajectory(
        prompt_tokens=prompt,
        lengths=np.array(lengths, np.int32),
        token_ids=draw(arrays.arrays(np.int32, total)),
        logprobs=draw(arrays.arrays(np.float32, total)),
        versions=versions,
        texts=draw(st.lists(st.text(), min_size=len(lengths), max_size=len(lengths))),
        finish_reasons=[draw(st.sampled_from(list(messages.FinishReason))) for _ in lengths],
        fingerprints=draw(st.just([]) | st.lists(st.text(), min_size=count, max_size=count)),
        **draw(st.just({}) | experts_of(len(prompt), lengths)),
    )


def experts_of(prompt_tokens: int, lengths: list[int]) -> st.SearchStrategy[dict[str, Any]]:
    before = max(0, prompt_tokens - 1)
    kinds = st.sampled_from([np.dtype("u1"), np.dtype("i2")])
    shapes = st.sampled_from([(1, before, 2, 3), (len(lengths), before, 2, 3)])
    return st.fixed_dictionaries(
        {
            "prompt_experts": arrays.arrays(kinds, shapes),
            "routed_experts": arrays.arrays(kinds, (sum(lengths), 2, 3)),
        }
    )


@dataclasses.dataclass(frozen=True)
class Held:
    """Message with one array."""

    values: NDArray[Any]


NUMBERS = arrays.arrays(
    st.sampled_from([np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int32)]),
    st.integers(1, 5),
    elements=st.integers(-(2**20), 2**20),
)
PROMPTS = st.builds(
    messages.Prompt,
    text=st.text(),
    tokens=arrays.arrays(np.int32, st.integers(0, 5)),
    answer=st.text(),
    metadata=st.dictionaries(st.text(), PLAIN, max_size=3),
    seed=st.integers(0, 2**64 - 1),
    min_version=st.integers(0, 2**64 - 1),
    exact_version=st.booleans(),
    greedy=st.booleans(),
    media=st.lists(st.deferred(lambda: SOURCES), max_size=2),
    messages=st.lists(st.dictionaries(st.text(), PLAIN, max_size=2), max_size=2),
)
OBSERVED = st.builds(
    messages.EnvironmentAnswer,
    st.text(),
    st.integers(-1, 99),
    st.lists(st.dictionaries(st.text(), PLAIN, max_size=2), max_size=2),
    st.none() | FINITE,
    st.booleans(),
    st.booleans(),
    st.dictionaries(st.text(), FINITE, max_size=2),
    st.none() | st.binary(),
)


@st.composite
def turns(draw: st.DrawFn) -> messages.Turn:
    length = draw(st.integers(0, 3))
    return messages.Turn(
        draw(st.integers(-1, 99)),
        draw(arrays.arrays(np.int32, draw(st.integers(0, 4)))),
        draw(arrays.arrays(np.int32, length)),
        draw(arrays.arrays(np.float32, length)),
        draw(arrays.arrays(np.int32, length)),
        draw(st.sampled_from(list(messages.FinishReason))).value,
        draw(st.text()),
        draw(st.text()),
        draw(st.text()),
        draw(st.lists(st.dictionaries(st.text(), PLAIN, max_size=2), max_size=2)),
        draw(st.text()),
        draw(st.lists(observed_media(), max_size=2)),
        draw(st.none() | arrays.arrays(np.uint8, (length, 2, 2))),
    )


SMALL = st.integers(0, 99)
SESSION_TURNS = st.builds(messages.SessionTurn, SMALL, SMALL, turns(), SMALL, st.text(), st.none() | OBSERVED)
SESSION_STEPS = st.builds(messages.SessionStep, SMALL, SMALL, SMALL, st.text(), OBSERVED)
SESSION_STATES = st.builds(
    messages.SessionState,
    SMALL,
    SMALL,
    st.just("") | st.sampled_from([reason.value for reason in messages.FinishReason]),
    st.none() | FINITE,
    st.dictionaries(st.text(), FINITE, max_size=2),
    st.booleans(),
    st.lists(SMALL, max_size=2),
    st.dictionaries(st.text(), FINITE, max_size=2),
    SMALL,
    st.text(),
    st.none() | OBSERVED,
)


@st.composite
def token_rewards(draw: st.DrawFn) -> messages.Reward:
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    each = arrays.arrays(np.float32, len(lengths), elements=st.integers(-9, 9))
    return messages.Reward(
        draw(each),
        draw(st.dictionaries(st.text(), each, max_size=2)),
        draw(arrays.arrays(np.float32, sum(lengths), elements=st.integers(-9, 9))),
        np.array(lengths, np.int32),
    )


REFERENCES = st.builds(
    lambda uri, n: TensorRef(uri, 64, 4 * n, "float32", (n,), "0" * 32), st.text(max_size=9), st.integers(0, 9)
)
SOURCES = st.builds(
    messages.MediaSource,
    st.sampled_from(messages.KINDS_OF_MEDIA),
    st.text(),
    xxh3_128=st.text("0a", min_size=1),
    size=st.integers(0, 2**62),
    stored=st.booleans(),
    start=st.none() | st.floats(0, 9),
    end=st.none() | st.floats(10, 99),
    options=st.dictionaries(st.text(), st.integers(0, 99), max_size=2),
)


@st.composite
def media(draw: st.DrawFn) -> messages.Media:
    kind = draw(st.sampled_from(messages.KINDS_OF_MEDIA))
    grid = draw(arrays.arrays(np.int32, 1 if kind == "audio" else 3, elements=st.integers(1, 99)))
    return messages.Media(kind, draw(st.integers(0, 3)), draw(REFERENCES), grid, 0, draw(st.integers(0, 5)))


@st.composite
def prepared_prompts(draw: st.DrawFn) -> messages.PreparedPrompt:
    tokens = draw(arrays.arrays(np.int32, st.integers(5, 9)))
    kind = draw(st.sampled_from([np.int32, np.float32]))
    positions = draw(arrays.arrays(kind, (3, len(tokens)), elements=st.integers(0, 99)))
    return messages.PreparedPrompt(tokens, draw(st.lists(media(), max_size=2)), positions, draw(FINITE))


@st.composite
def observed_media(draw: st.DrawFn) -> messages.ObservedMedia:
    sources = draw(st.lists(SOURCES, min_size=4, max_size=4))
    positions = draw(arrays.arrays(np.int32, (3, draw(st.integers(5, 9))), elements=st.integers(0, 99)))
    return messages.ObservedMedia(draw(st.integers(0, 99)), sources, draw(st.lists(media(), max_size=2)), positions)


@st.composite
def teacher_scores(draw: st.DrawFn) -> messages.TeacherScores:
    """Log-probs of tokens, with or without those of the k most likely ones."""
    tokens, k = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    logprobs = draw(arrays.arrays(np.float32, tokens, elements=st.integers(-9, 0)))
    if not k:
        return messages.TeacherScores(logprobs)
    ids = draw(arrays.arrays(np.int32, (tokens, k), elements=st.integers(0, 99)))
    top = draw(arrays.arrays(np.float32, (tokens, k), elements=st.integers(-9, 0)))
    return messages.TeacherScores(logprobs, ids, top)


OPENS = st.builds(
    messages.Open,
    st.text(),
    st.dictionaries(st.text(), PLAIN, max_size=2),
    st.integers(0, 2**64 - 1),
    st.none() | st.binary(),
    st.lists(st.text(), max_size=2),
    st.lists(st.text(), max_size=2),
)
ACTS = st.builds(messages.Act, st.text(), st.integers(0, 2**31), st.text())
ANSWERS = st.builds(
    messages.EnvironmentAnswer,
    st.text(),
    st.integers(-1, 2**31),
    st.lists(st.dictionaries(st.text(), PLAIN, max_size=2), max_size=2),
    st.none() | FINITE,
    st.booleans(),
    st.booleans(),
    st.dictionaries(st.text(), FINITE, max_size=2),
    st.none() | st.binary(),
    st.sampled_from(["", *map(str, messages.Fault)]),
    st.text(),
)
OTHERS: dict[type, st.SearchStrategy[Any]] = {
    messages.Prompt: PROMPTS,
    messages.MediaSource: SOURCES,
    messages.Media: media(),
    messages.PreparedPrompt: prepared_prompts(),
    messages.Open: OPENS,
    messages.Act: ACTS,
    messages.EnvironmentRequest: st.builds(
        messages.EnvironmentRequest, st.lists(OPENS, max_size=1), st.lists(ACTS, max_size=1), st.lists(st.text())
    ),
    messages.EnvironmentAnswer: ANSWERS,
    messages.EnvironmentAnswers: st.builds(
        messages.EnvironmentAnswers, st.lists(ANSWERS, max_size=1), st.integers(0, 9)
    ),
    messages.ObservedMedia: observed_media(),
    messages.Reward: st.builds(messages.Reward, NUMBERS) | token_rewards(),
    messages.Advantage: st.builds(messages.Advantage, NUMBERS, FINITE),
    messages.Dropped: st.builds(messages.Dropped, st.text(), st.text()),
    messages.Quarantined: st.builds(messages.Quarantined, st.text(), INTEGERS, st.text(), st.text()),
    messages.Batch: st.builds(
        messages.Batch, st.lists(INTEGERS), INTEGERS, INTEGERS, st.floats(), INTEGERS, INTEGERS, st.floats()
    ),
    messages.Shard: SHARDS,
    messages.Weights: st.builds(
        messages.Weights, INTEGERS, st.text(), st.lists(SHARDS, max_size=3), INTEGERS, st.none() | INTEGERS
    ),
    messages.RowCounts: ROW_COUNTS,
    messages.Checkpoint: st.builds(messages.Checkpoint, INTEGERS, st.text(), st.text(), INTEGERS, ROW_COUNTS, INTEGERS),
    messages.Requeued: st.builds(messages.Requeued, st.floats()),
    messages.Readmitted: st.builds(messages.Readmitted, st.text()),
    messages.Redelivery: st.builds(messages.Redelivery, st.text(), INTEGERS),
    messages.CriticVersion: st.builds(messages.CriticVersion, INTEGERS, st.text(), INTEGERS),
    messages.TeacherScores: teacher_scores(),
    messages.Evaluation: st.builds(
        messages.Evaluation,
        INTEGERS,
        st.floats(),
        INTEGERS,
        st.dictionaries(st.text(), st.builds(SetResult, INTEGERS, st.floats(), st.none() | st.floats()), max_size=2),
    ),
    messages.Turn: turns(),
    messages.SessionTurn: SESSION_TURNS,
    messages.SessionStep: SESSION_STEPS,
    messages.SessionState: SESSION_STATES,
    messages.SessionLog: st.builds(
        messages.SessionLog,
        st.lists(SESSION_TURNS, max_size=2),
        st.lists(SESSION_STATES, max_size=2),
        st.floats(0, 1e9),
        st.lists(SESSION_STEPS, max_size=2),
    ),
}
MESSAGES = OTHERS | {messages.Trajectory: trajectories()}
ANY_MESSAGE = st.one_of(*MESSAGES.values())
ANY_OTHER = st.one_of(*OTHERS.values())
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
