"""Messages between the gateway and rollout actors survive the codec, and refuse what is out of bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from broker.codec import decode, encode
from broker.errors import CodecError
from relax_actors.messages.generate import (
    MAX_GRAMMAR,
    CallNote,
    GenerateAnswer,
    GenerateCall,
    GeneratePiece,
    SessionAnswer,
    SessionCall,
)
from relax_actors.messages.session_log import SessionLog, SessionState, SessionTurn, Turn

TOKENS = arrays.arrays(np.int32, st.integers(0, 4), elements=st.integers(0, 2**31 - 1))
FLOATS = st.floats(-1e6, 1e6)
PLAIN = st.dictionaries(st.text(max_size=4), st.none() | st.integers(0, 9) | st.text(max_size=4), max_size=2)


@st.composite
def answers(draw: st.DrawFn) -> GenerateAnswer:
    tokens = draw(TOKENS)
    numbers = np.zeros(len(tokens), np.float32)
    return GenerateAnswer(tokens, numbers, tokens, "stop", draw(st.text()), draw(st.text()), prompt=draw(TOKENS))


@st.composite
def session_turns(draw: st.DrawFn) -> SessionTurn:
    tokens = draw(TOKENS)
    numbers = np.zeros(len(tokens), np.float32)
    messages = draw(st.lists(PLAIN, max_size=2))
    turn = Turn(-1, draw(TOKENS), tokens, numbers, tokens, "stop", draw(st.text()), "s", "c", messages)
    return SessionTurn(0, 0, turn)


CALLS = st.builds(
    GenerateCall,
    st.text(),
    TOKENS,
    messages=st.lists(PLAIN, max_size=2),
    settings=PLAIN,
    temperature=st.none() | st.floats(0, 100),
    top_p=st.none() | st.floats(0.1, 1),
    stop=st.lists(st.text(min_size=1), max_size=3),
    stop_ids=st.lists(st.integers(0, 9), max_size=3),
    grammar=st.text(),
)
PIECES = TOKENS.map(lambda tokens: GeneratePiece(3, tokens, tokens, np.zeros(len(tokens), np.float32)))
NOTES = st.builds(CallNote, st.text(), st.booleans())
SESSION_CALLS = st.builds(
    SessionCall,
    st.sampled_from(["take", "keep", "show", "end"]),
    st.text(),
    reward=st.none() | FLOATS,
    metrics=st.dictionaries(st.text(), FLOATS, max_size=2),
)
STATES = st.builds(
    SessionState,
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from(["", "stop", "error"]),
    st.none() | FLOATS,
    turns=st.lists(st.integers(0, 9), max_size=2),
)
LOGS = st.builds(SessionLog, st.lists(session_turns(), max_size=2), st.lists(STATES, max_size=2))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other)) and one.dtype == other.dtype
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__dataclass_fields__)
    return bool(one == other)


@settings(max_examples=60)
@given(
    answers()
    | CALLS
    | PIECES
    | NOTES
    | SESSION_CALLS
    | LOGS
    | st.builds(SessionAnswer, st.text(), st.text(), task=PLAIN)
)
def test_messages_survive_the_codec(value: Any) -> None:
    assert same(decode(encode(value, "gateway.0#1"), type(value)), value)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"temperature": -1.0}, r"^temperature of a request is -1\.0$"),
        ({"top_p": 0.0}, r"^top_p of a request is 0\.0$"),
        ({"tokens": np.zeros(1)}, r"^tokens of a request are float64\[1\], not \[len\] int32$"),
        ({"stop": [""]}, r"^max_tokens, stop or seconds of request 'x' are out of bounds$"),
        ({"stop_ids": [-1]}, r"^stop_ids of request 'x' are out of bounds$"),
        ({"grammar": "x", "session": "group-0-0-0-0"}, r"^request 'x' has a grammar in a session"),
        ({"grammar": "x" * (MAX_GRAMMAR + 1)}, r"more than 65536 characters$"),
        ({"seconds": float("nan")}, r"^max_tokens, stop or seconds of request 'x' are out of bounds$"),
    ],
)
def test_call_out_of_bounds_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        GenerateCall("x", **fields)


def test_forged_cells_of_sessions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^state of sample 0 .*not finite$"):
        SessionState(0, 0, "stop", float("nan"))
    with pytest.raises(ValueError, match=r"^reason 'won' of sample 0 is unknown$"):
        SessionState(0, 0, "won")
    with pytest.raises(CodecError):
        decode(encode({"turns": 3}, "rollout.0#1"), SessionLog)
