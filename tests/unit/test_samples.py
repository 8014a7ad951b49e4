"""Samples of several sequences: flat encoding, validation, and conversion to the input of engines."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.codec import decode, encode, open_envelope, plain_value
from broker.errors import CodecError
from relax_actors.engines.protocols import TrainSample
from relax_actors.messages import Reward, Sample, TokenSequence, Trajectory

PROMPT = np.array([1, 2, 3], np.int32)


def sequence(tokens: list[int], sampled: list[int], *, masked: tuple[int, ...] = (), version: int = 4) -> TokenSequence:
    """Build a sequence; tokens at `sampled` are sampled by the policy and trained, except those at `masked`."""
    wrote = np.isin(np.arange(len(tokens)), sampled)
    return TokenSequence(
        np.array(tokens, np.int32),
        wrote & ~np.isin(np.arange(len(tokens)), masked),
        np.where(wrote, -0.25 * np.arange(len(tokens)), 0).astype(np.float32),
        np.where(wrote, version, -1).astype(np.int32),
    )


EMPTY = sequence([1, 2, 3], [])


def episode() -> Trajectory:
    """Build two samples: one with two turns and a branch, and one plain completion."""
    turns = sequence([1, 2, 3, 7, 8, 50, 51, 9], [3, 4, 7])
    branch = sequence([1, 2, 40, 5, 6], [3, 4], masked=(4,))
    plain = sequence([1, 2, 3, 6, 7], [3, 4])
    samples = [Sample((turns, branch), "ab", "stop", {"turns": 3.0}), Sample((plain,), "c", "length", {"turns": 1.0})]
    return Trajectory.of(PROMPT, samples, {4: "f"})


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    prompt = np.array(draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)), np.int32)
    samples = []
    for _ in range(draw(st.integers(1, 3))):
        sequences = []
        for _ in range(draw(st.integers(1, 3))):
            shared = draw(st.integers(1, len(prompt)))
            own = draw(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=5))
            tokens = [*prompt[:shared].tolist(), *(token for token, _, _ in own)]
            wrote = [shared + i for i, (_, by_policy, _) in enumerate(own) if by_policy] or [shared]
            masked = [shared + i for i, (_, _, untrained) in enumerate(own) if untrained and shared + i != wrote[0]]
            sequences.append(sequence(tokens, wrote, masked=tuple(masked)))
        samples.append(Sample(tuple(sequences), "x", "stop"))
    return Trajectory.of(prompt, samples)


@given(trajectories())
def test_samples_round_trip_and_the_prompt_is_stored_once(trajectory: Trajectory) -> None:
    again = Trajectory.of(trajectory.prompt_tokens, trajectory.samples, trajectory.fingerprint_by_version)
    stored = decode(encode(trajectory, "rollout.0#1"), Trajectory)
    for other in (again, stored):
        assert other.counts.tolist() == trajectory.counts.tolist()
        for original, restored in zip(trajectory.sequences, other.sequences, strict=True):
            for name in ("token_ids", "loss_mask", "logprobs", "versions", "spans"):
                np.testing.assert_array_equal(getattr(original, name), getattr(restored, name))
    assert len(trajectory.token_ids) == sum(len(s.token_ids) for s in trajectory.sequences) - trajectory.shared.sum()


def test_episode_is_stored_flat_and_read_as_samples() -> None:
    trajectory = episode()
    assert trajectory.prompt_tokens.tolist() == [1, 2, 3]
    assert trajectory.lengths.tolist() == [5, 3, 2]
    assert trajectory.shared.tolist() == [3, 2, 3]
    assert trajectory.counts.tolist() == [2, 1]
    assert trajectory.sample_lengths.tolist() == [8, 2]
    assert trajectory.sequence_lengths == [8, 5, 5]
    first, second = trajectory.samples
    assert first.tokens.tolist() == [7, 8, 9, 5, 6]
    assert [s.spans.tolist() for s in first.sequences if s.spans is not None] == [[[3, 5], [7, 8]], [[3, 5]]]
    assert (first.metrics, second.metrics) == ({"turns": 3.0}, {"turns": 1.0})
    assert second.versions.tolist() == [4, 4]


def test_adjacent_turns_keep_their_spans() -> None:
    one = sequence([1, 2, 3, 7, 8, 9], [3, 4, 5])
    two = TokenSequence(one.token_ids, one.loss_mask, one.logprobs, one.versions, np.array([[3, 4], [4, 6]], np.int32))
    trajectory = Trajectory.of(PROMPT, [Sample((one,)), Sample((two,))])
    assert [s.spans.tolist() for s in trajectory.sequences if s.spans is not None] == [[[3, 6]], [[3, 4], [4, 6]]]


def test_completion_has_no_fields_of_an_episode() -> None:
    trajectory = Trajectory.of(PROMPT, [Sample((sequence([1, 2, 3, 6, 7], [3, 4]),), "c")])
    for name in ("loss_mask", "sequence_counts", "shared_lengths", "spans"):
        assert getattr(trajectory, name) is None
        assert name.encode() not in encode(trajectory, "rollout.0#1")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loss_mask": np.ones(9, np.bool_)}, "9 loss_mask do not hold 10 tokens"),
        ({"loss_mask": np.zeros(10, np.bool_)}, "no token of the trajectory is trained"),
        ({"loss_mask": np.ones(10, np.bool_)}, "true for a token that no policy sampled"),
        ({"loss_mask": np.ones(10, np.int32)}, "loss_mask of a trajectory is int32"),
        ({"logprobs": np.full(10, -1.0, np.float32)}, "has a log-prob other than 0"),
        ({"sequence_counts": np.array([3, 0], np.int32)}, "at least one sequence"),
        ({"sequence_counts": np.array([1, 1], np.int32)}, "2 sequences, but there are 3 lengths"),
        ({"shared_lengths": np.array([3, 2, 4], np.int32)}, "0 to all prompt tokens"),
        ({"shared_lengths": np.array([3, 2, 0], np.int32)}, "first token of a sequence"),
        ({"spans": np.array([[0, 3], [2, 4]], np.int32)}, "overlap, are out of order"),
        ({"spans": np.array([[0, 11]], np.int32)}, "reach beyond its tokens"),
        ({"metrics": {"turns": [1.0]}}, "metrics differ in number"),
        ({"metrics": {"turns": [1.0, float("nan")]}}, "of a sample is not finite"),
        ({"finish_reasons": ["stop", "bored"]}, "unknown finish reasons"),
    ],
)
def test_inconsistent_trajectory_is_refused(change: dict[str, Any], why: str) -> None:
    good = episode()
    fields = {name: getattr(good, name) for name in Trajectory.__dataclass_fields__}
    with pytest.raises(ValueError, match=why):
        Trajectory(**(fields | change))


def test_invalid_samples_are_refused_with_their_index() -> None:
    with pytest.raises(ValueError, match="sample 1 has no sequence"):
        Trajectory.of(PROMPT, [Sample((sequence([1, 2, 3, 4], [3]),)), Sample(())])
    with pytest.raises(ValueError, match="sample 1 has no metric 'turns'"):
        Trajectory.of(PROMPT, [Sample((sequence([1, 2, 3, 4], [3]),), metrics=m) for m in ({"turns": 1.0}, {})])
    with pytest.raises(ValueError, match="4 token_ids, 3 loss_mask"):
        TokenSequence(np.zeros(4, np.int32), np.zeros(3, np.bool_), np.zeros(4, np.float32), np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="first token of a sequence"):
        TrainSample(np.zeros(2, np.int32), np.ones(2, np.bool_))
    with pytest.raises(ValueError, match=r"shape \[1\]; it has 2 tokens"):
        TrainSample(np.zeros(2, np.int32), np.array([False, True]), advantages=np.zeros(1, np.float32))
    with pytest.raises(ValueError, match=r"shape \[\]; it has 2 tokens"):
        TrainSample(np.zeros(2, np.int32), np.array([False, True]), advantages=np.zeros((), np.float32))


@pytest.mark.parametrize(
    "fields",
    [
        {"components": {"a": np.zeros(3, np.float32)}},
        {"token_values": np.zeros(3, np.float32)},
        {"token_values": np.array([0, np.nan, 0], np.float32), "lengths": np.array([1, 2], np.int32)},
        {"token_values": np.zeros(3, np.float32), "lengths": np.array([1, 3], np.int32)},
        {"components": {"a": np.array([0, np.inf], np.float32)}},
    ],
)
def test_inconsistent_reward_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"reward|token_values"):
        Reward(np.zeros(2, np.float32), **fields)


def test_encoded_reward_of_nan_is_refused() -> None:
    good = Reward(np.zeros(2, np.float32), {}, np.full(3, 0.5, np.float32), np.array([1, 2], np.int32))
    data = encode(good, "reward.0#1")
    bad = data.replace(np.full(3, 0.5, np.float32).tobytes(), np.full(3, np.nan, np.float32).tobytes())
    assert bad != data
    with pytest.raises(CodecError, match="token_values of a reward is not finite"):
        decode(bad, Reward)


def malformed(**change: Any) -> bytes:
    """Encode a row of 2 and 3 tokens with some fields changed, without the checks of `Trajectory`."""
    fields: dict[str, Any] = {
        "prompt_tokens": np.array([1, 2, 3], np.int32),
        "lengths": np.array([2, 3], np.int32),
        "token_ids": np.array([1, 2, 3, 4, 5], np.int32),
        "logprobs": np.full(5, -1, np.float32),
        "versions": np.zeros(5, np.int32),
        "texts": ["a", "b"],
        "finish_reasons": ["stop", "stop"],
    } | change
    return encode(make_dataclass("Trajectory", fields)(**fields), "rollout.0#1")


@pytest.mark.parametrize(
    "change",
    [
        {
            "lengths": np.array([2**62, 2**62, 2**62, 2**62 + 5]),
            "shared_lengths": np.zeros(4, np.int32),
            "texts": ["a"] * 4,
            "finish_reasons": ["stop"] * 4,
        },
        {
            "lengths": np.array([2, 2, 1], np.int32),
            "sequence_counts": np.array([2**63 - 1, 2**63 - 1, 5]),
            "texts": ["a"] * 3,
            "finish_reasons": ["stop"] * 3,
        },
        {"spans": np.array([[0, 2]], np.uint8)},
        {"spans": np.array([[1, 3]], np.int32)},
        {"spans": np.array([[1, 1]], np.int32)},
        {"spans": np.array([[0, 2**31 - 1], [-(2**31), 5]], np.int32)},
        {"lengths": np.array([2, 3], np.int8)},
        {"lengths": np.array([2**31 - 1, 2**31 - 1], np.int32)},
        {"shared_lengths": np.array([3, 3], np.int16)},
        {"metrics": {"\x1b[31m": [1.0, 2.0]}},
    ],
)
def test_a_malformed_layout_is_a_codec_error_whatever_its_numbers(change: dict[str, Any]) -> None:
    assert decode(malformed(), Trajectory).sequence_lengths == [5, 6]
    with pytest.raises(CodecError):
        decode(malformed(**change), Trajectory)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [(np.array([2**32 + 4, 1, 1, 1]), "fit in int32"), (np.array([1.5, 1, 1, 1]), "give integers")],
)
def test_token_ids_that_would_change_are_refused(tokens: Any, why: str) -> None:
    one = TokenSequence(tokens, np.arange(4) == 3, np.zeros(4, np.float32), np.array([-1, -1, -1, 0], np.int32))
    with pytest.raises(ValueError, match=why):
        Trajectory.of(PROMPT, [Sample((one,))])


def test_a_mask_over_tokens_that_no_policy_sampled_is_refused() -> None:
    with pytest.raises(ValueError, match="only where the policy sampled"):
        TokenSequence(PROMPT, np.ones(3, np.bool_), np.zeros(3, np.float32), np.full(3, -1, np.int32))


def test_nested_dataclasses_of_plain_values_keep_fields_with_defaults() -> None:
    @dataclass
    class Score:
        name: str
        bonus: float = 0.0

    found = plain_value(open_envelope(encode([Score("a"), Score("b", 1.0)], "role.0#1")))
    assert found == [{"name": "a", "bonus": 0.0}, {"name": "b", "bonus": 1.0}]


def test_entropies_are_kept_by_token_for_all_sampled_sequences_or_none() -> None:
    plain = episode()
    assert plain.entropies is None
    sequences = [replace(one, entropies=np.where(one.sampled, 0.25, 0).astype(np.float32)) for one in plain.sequences]
    samples = [
        replace(plain.samples[0], sequences=tuple(sequences[:2])),
        Sample((sequences[2],), "c", "length", {"turns": 1.0}),
    ]
    known = Trajectory.of(PROMPT, samples)
    assert known.entropies is not None
    assert known.entropies.tolist() == np.where(known.versions >= 0, 0.25, 0).tolist()
    for one, before in zip(known.sequences, sequences, strict=True):
        np.testing.assert_array_equal(one.entropies, before.entropies)
    mixed = [samples[0], Sample((plain.sequences[2],), "c", "length", {"turns": 1.0})]
    assert Trajectory.of(PROMPT, mixed).entropies is None
    for wrong in (np.full(len(known.token_ids), np.nan, np.float32), -known.entropies, known.entropies[:2]):
        with pytest.raises(ValueError, match=r"entrop.*(negative or not finite|float32\[2\])"):
            replace(known, entropies=wrong)
