"""Conversion of rows to the samples that engines train: masks, statistics, pairs and entropies."""

from __future__ import annotations

import numpy as np
import pytest

from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.messages import Advantage, Sample, Trajectory
from relax_actors.training.samples import has_pair, only_pair, samples_of, without_truncated
from relax_actors.training.step_advantages import StepAdvantages
from relax_actors.training.step_rows import StepRows
from tests.support.messages import assert_says
from tests.unit.test_samples import EMPTY, PROMPT, episode, sequence


def test_engines_get_one_train_sample_for_each_trained_sequence() -> None:
    trajectory = episode()
    advantage = Advantage(np.array([2.0, -1.0], np.float32), 0.5, returns=np.arange(10, dtype=np.float32))
    scores = {"actor_fwd": np.arange(10, dtype=np.float32), "reference": -np.arange(10, dtype=np.float32)}
    found = samples_of(7, trajectory, advantage, scores)
    assert [s.masked("token_ids").tolist() for s in found] == [[7, 8, 9], [5], [6, 7]]
    assert [s.masked("advantages").tolist() for s in found] == [[2, 2, 2], [2], [-1, -1]]
    assert [s.masked("proximal_logprobs").tolist() for s in found] == [[0, 1, 4], [6], [8, 9]]
    assert [s.masked("reference_logprobs").tolist() for s in found] == [[0, -1, -4], [-6], [-8, -9]]
    assert [s.masked("returns").tolist() for s in found] == [[0, 1, 4], [6], [8, 9]]
    assert [s.sample_tokens for s in found] == [4, 4, 2]
    assert [s.share for s in found] == [0.75, 0.25, 1.0]
    assert {s.row for s in found} == {7}


def test_masked_sample_is_not_passed_to_engines() -> None:
    trained, untrained = sequence([1, 2, 3, 6], [3]), sequence([1, 2, 3, 7], [3], masked=(3,))
    trajectory = Trajectory.of(PROMPT, [Sample((trained,)), Sample((untrained,))])
    advantage = Advantage(np.array([1.0, -1.0], np.float32), 0.0)
    assert [s.masked("advantages").tolist() for s in samples_of(0, trajectory, advantage)] == [[1.0]]


def test_step_statistics_of_token_advantages_cover_trained_tokens() -> None:
    values = np.array([1, 2, 99, 99, 3, 4, 99, 99, 5, 6], np.float32)
    rows = StepRows([0], [episode()], [Advantage(values, 0.0)])
    found = StepAdvantages(AlgorithmSection(scale="none", whiten="tokens")).apply(rows).samples()
    flat = np.concatenate([s.masked("advantages") for s in found])
    trained = values[episode().trained]
    np.testing.assert_allclose(flat, (trained - trained.mean()) / (trained.std(ddof=1) + 1e-8), rtol=1e-6)
    assert StepAdvantages(AlgorithmSection()).apply(rows) is rows


def test_masked_truncated_samples_are_not_trained() -> None:
    cut = Sample((sequence([1, 2, 3, 6], [3]),), finish_reason="length")
    whole = Sample((sequence([1, 2, 3, 7], [3]),))
    kept = without_truncated(Trajectory.of(PROMPT, [cut, whole]))
    assert isinstance(kept, Trajectory)
    assert kept.trained_lengths.tolist() == [0, 1]
    untouched = Trajectory.of(PROMPT, [whole])
    assert without_truncated(untouched) is untouched
    error = without_truncated(Trajectory.of(PROMPT, [cut]))
    assert_says(error, "cut off", "algorithm.shaping.mask_truncated")


def test_untrained_samples_do_not_enter_the_statistics_of_a_step() -> None:
    trained, untrained = sequence([1, 2, 3, 6], [3]), sequence([1, 2, 3, 7], [3], masked=(3,))
    trajectory = Trajectory.of(PROMPT, [Sample((trained,)), Sample((trained,)), Sample((untrained,))])
    rows = StepRows([0], [trajectory], [Advantage(np.array([1.0, 3.0, 100.0], np.float32), 0.0)])
    whitened = StepAdvantages(AlgorithmSection(scale="none", whiten="samples")).apply(rows)
    found = [s.masked("advantages").tolist() for s in whitened.samples()]
    np.testing.assert_allclose(found, [[-(0.5**0.5)], [0.5**0.5]], rtol=1e-6)


def test_samples_and_tokens_of_a_row_are_told_apart_when_there_are_as_many() -> None:
    row = Trajectory.of(PROMPT, [Sample((s,), "a", "stop") for s in (sequence([1, 2, 3, 6, 7], [3, 4]), EMPTY)])
    for per_token, expected in ((False, [2.0, 2.0]), (True, [2.0, -1.0])):
        advantage = Advantage(np.array([2.0, -1.0], np.float32), 0.5, per_token=per_token)
        (found,) = samples_of(0, row, advantage)
        np.testing.assert_array_equal(found.masked("advantages"), np.array(expected, np.float32))
        (whitened,) = (
            StepAdvantages(AlgorithmSection(scale="none", whiten="tokens"))
            .apply(StepRows([0], [row], [advantage]))
            .advantages
        )
        np.testing.assert_allclose(whitened.values[0], 0.0 if not per_token else 0.70710678, rtol=1e-6)


PAIR_AND_MORE = Trajectory.of(PROMPT, [Sample((sequence([1, 2, 3, 6, 7], [3, 4]),), "x", "stop")] * 3)


def signed(*values: float) -> Advantage:
    return Advantage(np.array(values, np.float32), 0.0)


def test_only_the_samples_of_a_pair_are_trained() -> None:
    assert has_pair(PAIR_AND_MORE, signed(1, 0, -1))
    assert only_pair(PAIR_AND_MORE, signed(1, 0, -1)).trained.tolist() == [True, True, False, False, True, True]
    assert only_pair(PAIR_AND_MORE, signed(1, -1, 1)) is PAIR_AND_MORE


@pytest.mark.parametrize("advantage", [signed(0, 0, 0), signed(1, 0, 0), signed(0, -1, 0)])
def test_row_without_both_answers_has_no_pair(advantage: Advantage) -> None:
    assert not has_pair(PAIR_AND_MORE, advantage)


def test_pair_whose_answer_was_cut_off_is_none() -> None:
    samples = [Sample((sequence([1, 2, 3, 6, 7], [3, 4]),), "x", reason) for reason in ("stop", "length", "stop")]
    masked = without_truncated(Trajectory.of(PROMPT, samples))
    assert isinstance(masked, Trajectory)
    assert has_pair(masked, signed(1, 0, -1))
    assert not has_pair(masked, signed(0, 1, -1))
