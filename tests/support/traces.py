"""Traces of random samples: turns, branches, masks, versions and log-probs of any bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from relax_actors.data.character_tokenizer import make_character_tokenizer
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.messages import Prompt, Reward, Sample, TokenSequence, Trajectory
from relax_actors.traces import Trace, traces_of
from relax_actors.traces.write import record_of, write_records

LOGPROBS = st.floats(-100, 0, width=32)
NUMBERS = st.floats(-1e6, 1e6, width=32)
PLAIN = st.dictionaries(
    st.text(max_size=4),
    st.one_of(
        st.integers(-(2**53), 2**53), NUMBERS, st.text(max_size=5), st.booleans(), st.none(), st.binary(max_size=4)
    ),
    max_size=3,
)


@st.composite
def sequences(draw: st.DrawFn, prompt: list[int]) -> TokenSequence:
    """Draw a sequence of turns with observations between them, some of whose sampled tokens are not trained."""
    tokens, logprobs, versions, mask, spans = (
        list(prompt),
        [0.0] * len(prompt),
        [-1] * len(prompt),
        [False] * len(prompt),
        [],
    )
    for _ in range(draw(st.integers(1, 3))):
        turn = draw(st.lists(st.tuples(st.integers(0, 300), LOGPROBS, st.booleans()), min_size=1, max_size=4))
        seen = draw(st.lists(st.integers(0, 300), max_size=3))
        version = draw(st.integers(0, 5))
        spans.append((len(tokens), len(tokens) + len(turn)))
        tokens += [*(token for token, _, _ in turn), *seen]
        logprobs += [*(value for _, value, _ in turn), *[0.0] * len(seen)]
        mask += [*(trained for _, _, trained in turn), *[False] * len(seen)]
        versions += [*[version] * len(turn), *[-1] * len(seen)]
    mask[spans[0][0]] = True
    return TokenSequence(
        np.array(tokens, np.int32),
        np.array(mask, np.bool_),
        np.array(logprobs, np.float32),
        np.array(versions, np.int32),
        np.array(spans, np.int32),
    )


@st.composite
def rows(draw: st.DrawFn) -> tuple[Trajectory, list[Trace]]:
    """Draw the samples of a row, and their traces."""
    prompt = draw(st.lists(st.integers(0, 300), min_size=1, max_size=4))
    samples = []
    for number in range(draw(st.integers(1, 3))):
        own = draw(st.lists(sequences(prompt), min_size=1, max_size=2))
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": draw(st.text(max_size=5))}]
        samples.append(
            Sample(
                tuple(own),
                draw(st.text(max_size=5)),
                "stop",
                {"turns": float(number)},
                messages=draw(st.sampled_from([[], messages])),
            )
        )
    trajectory = Trajectory.of(np.array(prompt, np.int32), samples, {1: "abc"})
    n, total = len(samples), len(trajectory.token_ids)
    values = np.array(draw(st.lists(NUMBERS, min_size=n, max_size=n)), np.float32)
    reward = Reward(values, {"part": values[::-1].copy()})
    advantages = np.array(draw(st.lists(NUMBERS, min_size=total, max_size=total)), np.float32)
    given = Prompt("p", np.array(prompt, np.int32), "answer", draw(PLAIN), 1, 0)
    facts = {"run": "r", "row": "group.1.2", "step": 1, "author": "rollout.0#1"}
    return trajectory, traces_of(given, trajectory, reward, **facts, token_values={"advantage": advantages})


def trace_of(number: int) -> Trace:
    """Return the trace of a sample of one turn, of a prompt of its own."""
    prompt, completion = np.array([1, number + 2], np.int32), np.array([5, 6], np.int32)
    logprobs, versions = np.full(2, -0.5, np.float32), np.full(2, 3, np.int32)
    sample = Sample((TokenSequence.of_completion(prompt, completion, logprobs, versions),), f"answer {number}")
    given = Prompt(f"prompt {number}", prompt, str(number), {}, 1, 0)
    facts = {"run": "r", "row": f"group.0.{number}", "step": 0, "author": "rollout.0#1"}
    return traces_of(given, Trajectory.of(prompt, [sample]), Reward(np.array([1.0], np.float32)), **facts)[0]


def own(**changes: Any) -> Trace:
    """Build an exact trace of two sampled tokens."""
    sequence = TokenSequence.of_completion(
        np.array([1, 2], np.int32), np.array([3, 4], np.int32), np.array([-0.5, -1], np.float32), np.array([0, 0])
    )
    return Trace(**{"prompt_tokens": np.array([1, 2], np.int32), "sequences": (sequence,), "reward": 1.0, **changes})


def digits(folder: Path) -> Tokenizer:
    """Make a tokenizer of digits."""
    folder.mkdir(exist_ok=True)
    make_character_tokenizer("0123456789>#", "#", folder)
    return Tokenizer(folder)


def same_trace(one: Trace, other: Trace) -> bool:
    """Return whether two traces are equal, arrays compared bit for bit."""
    return bool(_plain(one) == _plain(other))


def _plain(value: Any) -> Any:
    """Return a value with arrays as type, shape and bytes, so that equality means equal bits."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    names = getattr(type(value), "__dataclass_fields__", None)
    if names is None:
        return value
    return {name: _plain(getattr(value, name)) for name, field_ in names.items() if field_.compare}


def write_traces(path: Path, kind: str, traces: Iterable[Trace]) -> int:
    """Write traces, and return their number; errors as `write_records`, and TraceError of `record_of`."""
    return write_records(path, kind, (record_of(trace, kind) for trace in traces))
