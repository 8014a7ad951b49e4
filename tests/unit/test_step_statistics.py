"""Statistics of a step: whitening, the standard deviation of its rewards, samples without signal, running means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.algorithms.step_statistics import (
    RowAdvantages,
    scale_by_reward_std,
    scale_by_signal,
    subtract_running_means,
    whiten,
)
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.messages import Advantage, Trajectory
from relax_actors.training.step_advantages import StepAdvantages
from relax_actors.training.step_rows import StepRows


def row(
    values: list[float], lengths: list[int] | None = None, rewards: list[float] | None = None, role: str = ""
) -> RowAdvantages:
    """A row with one trained token a sample unless lengths are given; all tokens are trained."""
    lengths = [1] * len(values) if lengths is None else lengths
    return RowAdvantages(
        values=np.array(values, np.float64),
        lengths=np.array(lengths, np.int64),
        mask=np.ones(sum(lengths), np.bool_),
        rewards=np.array(values if rewards is None else rewards, np.float64),
        role=role,
    )


@given(st.lists(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=4), min_size=1, max_size=5))
def test_whitened_steps_have_mean_0_and_deviation_1(values: list[list[float]]) -> None:
    whitened = np.concatenate([found.values for found in whiten([row(one) for one in values], over="samples")])
    flat = np.concatenate(values)
    if flat.min() == flat.max():
        assert not whitened.any()
    elif flat.std(ddof=1) > 1e-3:
        assert whitened.mean() == pytest.approx(0, abs=1e-9)
        assert whitened.std(ddof=1) == pytest.approx(1, rel=1e-4)


def test_tokens_weigh_samples_by_their_length_and_empty_samples_do_not_count() -> None:
    rows = [row([1.0, 5.0, 9.0], [3, 1, 0])]
    numbers = np.array([1.0, 1.0, 1.0, 5.0])
    expected = (np.array([1.0, 5.0]) - numbers.mean()) / (numbers.std(ddof=1) + 1e-8)
    by_token = whiten(rows, over="tokens")[0].values
    np.testing.assert_allclose(by_token, [*expected, 0.0], rtol=1e-12)
    spread = row(numbers.tolist(), [3, 1, 0])
    np.testing.assert_allclose(whiten([spread], over="tokens")[0].values, np.repeat(by_token, [3, 1, 0]), rtol=1e-12)
    by_sample = whiten(rows, over="samples")[0].values
    np.testing.assert_allclose(by_sample, [-2 / np.sqrt(8), 2 / np.sqrt(8), 0.0], rtol=1e-7)


def test_whitening_tokens_over_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=r'whitened over samples; set algorithm\.whiten = "tokens"'):
        whiten([row([1.0, 2.0, 3.0], [2, 1])], over="samples")


def test_reward_std_of_the_step_divides_all_rows() -> None:
    rows = [row([-1.0, 1.0], rewards=[0.0, 2.0]), row([0.0, 0.0], rewards=[4.0, 4.0])]
    scale = np.std([0, 2, 4, 4], ddof=1) + 0.5
    found = scale_by_reward_std(rows, epsilon=0.5)
    np.testing.assert_allclose(found[0].values, [-1 / scale, 1 / scale], rtol=1e-12)
    equal = [row([0.0], rewards=[3.0])] * 2
    assert scale_by_reward_std(equal)[0].values.tolist() == [0.0]


def test_signal_scale_is_samples_over_samples_of_groups_with_unequal_rewards() -> None:
    # GPG: B = 6 samples, M = 4 of them in groups with equal rewards; alpha = 6 / 2.
    rows = [
        row([-0.5, 0.5], rewards=[0.0, 1.0]),
        row([0.0, 0.0], rewards=[1.0, 1.0]),
        row([0.0, 0.0], rewards=[0.0, 0.0]),
    ]
    assert scale_by_signal(rows)[0].values.tolist() == [-1.5, 1.5]
    assert scale_by_signal(rows[1:])[0].values.tolist() == [0.0, 0.0]


def test_running_means_are_kept_by_role_in_the_order_of_the_rows() -> None:
    # RAE: A = r - b, then b = 0.5 b + 0.5 r; b starts at 0.
    rows = [row([1.0, 3.0], role="white"), row([8.0], role="black"), row([1.0], role="white")]
    found, means = subtract_running_means(rows, {}, decay=0.5)
    assert [one.values.tolist() for one in found] == [[1.0, 2.5], [8.0], [-0.75]]
    assert means == {"white": 1.375, "black": 4.0}
    tokens, _ = subtract_running_means([row([1.0, 2.0, 5.0], [2, 1], rewards=[1.0, 3.0])], {"": 1.0}, decay=0.5)
    assert tokens[0].values.tolist() == [0.0, 1.0, 4.0]


def test_running_means_survive_a_checkpoint_with_every_bit(tmp_path: Path) -> None:
    algorithm = AlgorithmSection(advantage="ema", scale="none")
    first, second = StepAdvantages(algorithm), StepAdvantages(algorithm)
    first.means = {"white": 0.1 + 0.2, "black": -1 / 3}
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.means == first.means
    plain = StepAdvantages(AlgorithmSection())
    plain.save(tmp_path / "none")
    plain.load(tmp_path / "none")


def test_coefficient_of_the_kl_in_the_reward_adapts_and_survives_a_checkpoint(tmp_path: Path) -> None:
    # 1909.08593: times 1 + clip(KL / target - 1, -0.2, 0.2) x samples / horizon; 4 samples.
    kl = {"place": "reward", "kind": "k1", "coefficient": 0.1, "target": 2.0, "horizon": 10}
    algorithm = AlgorithmSection.model_validate({"advantage": "returns", "scale": "none", "kl": kl})
    statistics, other = StepAdvantages(algorithm), StepAdvantages(algorithm)
    assert statistics.kl_coefficient == 0.1
    statistics.apply(step_rows([2.1, 2.3]))  # mean 2.2: 10 % over the target
    assert statistics.kl_coefficient == pytest.approx(0.1 * (1 + 0.1 * 4 / 10), rel=1e-12)
    statistics.apply(step_rows([9.0, 9.0]))
    assert statistics.kl_coefficient == pytest.approx(0.104 * (1 + 0.2 * 4 / 10), rel=1e-12)
    statistics.save(tmp_path)
    other.load(tmp_path)
    assert other.kl_coefficient == statistics.kl_coefficient
    fixed = AlgorithmSection.model_validate({"kl": {"place": "reward", "kind": "k1"}})
    assert StepAdvantages(fixed).kl_coefficient is None


def step_rows(kls: list[float]) -> StepRows:
    """Rows of two samples with one token each, whose rewards contain these KLs."""
    two = np.array([1, 1], np.int32)
    trajectory = Trajectory(two, two, two, np.zeros(2, np.float32), np.zeros(2, np.int32), ["", ""], ["stop"] * 2)
    advantages = [Advantage(np.array([1.0, -1.0], np.float32), 0.0, kl=kl) for kl in kls]
    return StepRows(list(range(len(kls))), [trajectory] * len(kls), advantages)


def test_missing_rewards_are_named() -> None:
    bare = RowAdvantages(values=np.zeros(1), lengths=np.ones(1, np.int64), mask=np.ones(1, np.bool_))
    with pytest.raises(ValueError, match=r"^a row has no rewards .*role advantages"):
        scale_by_reward_std([bare])
