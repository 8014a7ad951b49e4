"""Figures of the samples of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.messages import Advantage, Trajectory
from relax_actors.training.step_figures import has_few_grams, is_repetitive, step_figures

END = 11


def row(samples: list[list[int]], reasons: list[str], **more: object) -> Trajectory:
    tokens = np.concatenate([np.array(sample, np.int32) for sample in samples])
    fields = {
        "prompt_tokens": np.array([5, 3, 1], np.int32),
        "texts": ["".join(map(str, sample)) for sample in samples],
        "logprobs": np.zeros(len(tokens), np.float32),
        "versions": np.zeros(len(tokens), np.int32),
    }
    lengths = np.array([len(sample) for sample in samples], np.int32)
    return Trajectory(token_ids=tokens, lengths=lengths, finish_reasons=reasons, **{**fields, **more})  # type: ignore[arg-type]


def advantage(*values: float) -> Advantage:
    return Advantage(np.array(values, np.float32), 0.5)


def test_lengths_ends_and_signal_are_counted() -> None:
    trajectories = [
        row([[1, 2, END], [1, 2, END], [4, 4, 4, 4]], ["stop", "stop", "length"]),
        row([[7, 7], [8, END], [9, END]], ["stop", "stop", "stop"]),
    ]
    figures = step_figures(trajectories, [advantage(1.0, 1.0, -2.0), advantage(0.0, 0.0, 0.0)])
    assert figures["length_mean"] == pytest.approx(16 / 6, abs=1e-4)
    assert figures["length_max"] == 4
    assert figures["truncated"] == pytest.approx(1 / 6, abs=1e-4)
    assert figures["no_signal"] == 0.5
    assert figures["distinct"] == pytest.approx((2 / 3 + 1) / 2, abs=1e-4)
    assert (figures["length_better"], figures["length_worse"]) == (3, 4)
    assert figures["end_share"] == 0.8
    assert figures["end_trained"] == 1
    assert figures["prompt_doubled"] == 0


def test_masked_end_tokens_are_not_trained() -> None:
    mask = np.array([True, True, False, True, True, False])
    trajectory = row([[1, 2, END], [3, 4, END]], ["stop", "stop"], loss_mask=mask)
    assert step_figures([trajectory], [advantage(1.0, -1.0)])["end_trained"] == 0


def test_marks_and_doubled_begin_tokens_are_found() -> None:
    trajectory = row(
        [[1, 2], [3, 4]],
        ["length", "length"],
        texts=["yes<|im_end|>\n<|im_start|>user", "no"],
        prompt_tokens=np.array([6, 6, 1], np.int32),
    )
    figures = step_figures([trajectory], [advantage(1.0, -1.0)])
    assert (figures["marked"], figures["prompt_doubled"]) == (0.5, 1)
    assert "end_share" not in figures


def test_repeated_texts_are_told_from_prose() -> None:
    numbers = " ".join(str(n * n * 7919 % 99991) for n in range(4000))
    assert is_repetitive(numbers + "and again. " * 2000)
    assert not is_repetitive(numbers)
    assert not is_repetitive("again " * 20)  # shorter than a window


@given(st.lists(st.integers(0, 3), max_size=200), st.sampled_from([1, 40_000, 300_000_000]))
def test_short_and_varied_samples_have_enough_grams(tokens: list[int], scale: int) -> None:
    grams = {tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)}
    sample = np.array([scale * token for token in tokens], np.int32)
    assert has_few_grams(sample) == (len(tokens) >= 64 and len(grams) < 0.2 * (len(tokens) - 3))


def test_rows_without_advantages_of_samples_have_no_length_by_advantage() -> None:
    per_token = Advantage(np.array([1.0, -1.0, 0.5, 0.5], np.float32), 0.5, per_token=True)
    figures = step_figures([row([[1, 2], [3, END]], ["length", "stop"])], [per_token])
    assert "length_better" not in figures
    assert figures["no_signal"] == 0


def test_samples_are_compared_within_their_row() -> None:
    same = row([[1, 2], [1, 2]], ["length", "length"])
    figures = step_figures([same, same, row([[1, 2], [4]], ["length", "length"])], [advantage(1.0, -1.0)] * 3)
    assert figures["distinct"] == pytest.approx((0.5 + 0.5 + 1) / 3, abs=1e-4)
