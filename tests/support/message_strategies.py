"""Strategies that draw messages of every type, and arrays of every dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from broker.fields import TensorRef
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
