"""Compact storage of recorded experts, and validation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from hypothesis.extra import numpy as arrays

from relax_actors.messages import Trajectory
from relax_actors.messages.experts import compact, expand, invalid_reason, split_prompt_experts


@given(arrays.arrays(np.int16, arrays.array_shapes(max_dims=3, max_side=5), elements=some.integers(-1, 300)))
def test_compact_experts_expand_to_the_original(chosen: Any) -> None:
    stored = compact(chosen)
    assert stored.dtype == (np.uint8 if chosen.max() < 255 else np.int16)
    np.testing.assert_array_equal(expand(stored), chosen)


def test_empty_array_is_valid() -> None:
    assert compact(np.zeros((0, 2, 2), np.int16)).shape == (0, 2, 2)
    assert invalid_reason(np.zeros((0, 2, 2), np.int16), 4) == ""


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ([[0, 3], [2, 1], [-1, -1]], ""),
        ([[0, 4]], "an expert is not from 0 to 3"),
        ([[0, -2]], "an expert is not from 0 to 3"),
        ([[2, 2]], "an expert is chosen twice for one token"),
        ([[2, -1]], "a token has only some of its experts"),
        ([[0, 1], [-1, 3]], "a token has only some of its experts"),
    ],
)
def test_impossible_experts_have_a_reason(chosen: list[list[int]], why: str) -> None:
    assert invalid_reason(np.array(chosen, np.int16), 4) == why


def trajectory(samples: list[Any], prompt: int, **changed: Any) -> Trajectory:
    lengths = np.array([len(s) - prompt + 1 for s in samples], np.int32)
    total = int(lengths.sum())
    prompts, routed = split_prompt_experts(samples, prompt)
    fields: dict[str, Any] = {
        "prompt_tokens": np.zeros(prompt, np.int32),
        "lengths": lengths,
        "token_ids": np.zeros(total, np.int32),
        "logprobs": np.zeros(total, np.float32),
        "versions": np.zeros(total, np.int32),
        "texts": [""] * len(samples),
        "finish_reasons": ["stop"] * len(samples),
        "prompt_experts": prompts,
        "routed_experts": routed,
    }
    return Trajectory(**(fields | changed))


@given(some.integers(1, 4), some.lists(some.integers(1, 4), min_size=1, max_size=3), some.booleans())
def test_experts_round_trip_and_a_common_prompt_is_stored_once(
    prompt: int,
    lengths: list[int],
    same: bool,  # noqa: FBT001 drawn
) -> None:
    random = np.random.default_rng(prompt)
    first = random.integers(0, 8, (prompt - 1, 2, 3)).astype(np.int16)
    samples = []
    for length in lengths:
        own = first if same else random.integers(0, 8, first.shape).astype(np.int16)
        samples.append(np.concatenate([own, random.integers(-1, 8, (length, 2, 3)).astype(np.int16)]))
    found = trajectory(samples, prompt)
    assert found.prompt_experts is not None
    if same:
        assert len(found.prompt_experts) == 1
    for sequence, experts in zip(found.sequences, samples, strict=True):
        assert sequence.routed_experts is not None
        np.testing.assert_array_equal(sequence.routed_experts, experts)


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt_experts": None},
        {"routed_experts": None},
        {"routed_experts": np.zeros((5, 2, 3), np.int32)},
        {"routed_experts": np.zeros((6, 2, 3), np.uint8)},
        {"routed_experts": np.zeros((5, 6), np.uint8)},
        {"prompt_experts": np.zeros((1, 1, 2, 3), np.uint8)},
        {"prompt_experts": np.zeros((3, 2, 2, 3), np.uint8)},
        {"prompt_experts": np.zeros((1, 2, 2, 4), np.uint8)},
    ],
)
def test_experts_that_do_not_match_the_tokens_are_refused(changed: dict[str, Any]) -> None:
    samples = [np.zeros((4, 2, 3), np.int16), np.zeros((5, 2, 3), np.int16)]
    assert trajectory(samples, 3).sequences[0].routed_experts is not None
    with pytest.raises(ValueError, match="experts"):
        trajectory(samples, 3, **changed)
