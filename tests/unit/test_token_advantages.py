"""Estimators of one advantage a token: the papers' equations worked by hand, with masked tokens and empty samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from relax_actors.algorithms import vocabulary
from relax_actors.algorithms.advantages import Group
from relax_actors.algorithms.advantages.returns import gae, returns
from relax_actors.algorithms.advantages.token_baseline import optimal_token, optimal_turn
from relax_actors.testing import check_advantage

MASK = np.array([True, False, True, True])  # a tool's answer between two turns
LENGTHS = np.array([4, 0])


def test_estimators_of_tokens_pass_the_checks_for_users() -> None:
    for function in (optimal_token, optimal_turn):
        check_advantage(function)
    for function in (returns, gae):
        check_advantage(function, zero_if_equal=False, gamma=0.9, gae_lambda=0.8)


def test_returns_are_discounted_sums_of_kl_and_final_reward() -> None:
    # REINFORCE++: G_t = r_t + gamma G_{t+1}, with -KL at each token and the reward at the last one.
    kl = np.array([-0.1, 0.2, -0.3])
    found = returns(Group(rewards=np.array([2.0]), lengths=np.array([3]), token_rewards=kl), gamma=0.5)
    last = -0.3 + 2.0
    np.testing.assert_allclose(found, [-0.1 + 0.5 * (0.2 + 0.5 * last), 0.2 + 0.5 * last, last], rtol=1e-12)


def test_masked_tokens_cost_no_discount_and_pass_their_reward_to_the_token_before() -> None:
    tokens = np.array([0.0, 4.0, 0.0, 0.0])
    given = Group(rewards=np.array([8.0, 1.0]), lengths=LENGTHS, loss_mask=MASK, token_rewards=tokens)
    # Time steps: tokens 0, 2 and 3. The reward of the tool's answer is that of token 0.
    assert returns(given, gamma=0.5).tolist() == [4.0 + 2.0, 0.0, 4.0, 8.0]


def test_rewards_before_the_first_trained_token_are_ignored() -> None:
    mask, tokens = np.array([False, True]), np.array([5.0, 1.0])
    found = returns(Group(rewards=np.zeros(1), lengths=np.array([2]), loss_mask=mask, token_rewards=tokens))
    assert found.tolist() == [0.0, 1.0]


def test_gae_follows_its_equations_over_trained_tokens() -> None:
    values, gamma, lam = np.array([0.5, 99.0, 0.25, 1.0]), 0.5, 0.5
    found = gae(
        Group(rewards=np.array([2.0, 7.0]), lengths=LENGTHS, loss_mask=MASK, values=values),
        gamma=gamma,
        gae_lambda=lam,
    )
    # delta_t = r_t + gamma V_{t+1} - V_t at tokens 0, 2 and 3; the value after the last is 0.
    deltas = [gamma * 0.25 - 0.5, gamma * 1.0 - 0.25, 2.0 - 1.0]
    last = deltas[2]
    middle = deltas[1] + gamma * lam * last
    np.testing.assert_allclose(found, [deltas[0] + gamma * lam * middle, 0.0, middle, last], rtol=1e-12)


def test_gae_without_discounts_is_the_return_minus_the_value() -> None:
    values = np.array([0.5, 99.0, 0.25, 1.0])
    given = Group(rewards=np.array([2.0, 7.0]), lengths=LENGTHS, loss_mask=MASK, values=values)
    np.testing.assert_allclose(gae(given), [1.5, 0.0, 1.75, 1.0], rtol=1e-12)
    # lambda = 0 is the error of one step.
    np.testing.assert_allclose(gae(given, gae_lambda=0.0), [-0.25, 0.0, 0.75, 1.0], rtol=1e-12)


def test_optimal_token_baseline_weighs_returns_by_accumulated_energy() -> None:
    # Probabilities .5 and .25 of two samples; energies 1 - 2 p + sum of squares.
    logprobs = np.log([0.5, 0.5, 0.25, 0.5, 0.5])
    squares = np.array([0.5, 0.4, 0.3, 0.5, 0.6])
    energy = [1 - 2 * p + s for p, s in zip([0.5, 0.5, 0.25, 0.5, 0.5], squares, strict=True)]
    rewards = np.array([1.0, 3.0])
    given = Group(rewards=rewards, lengths=np.array([2, 3]), logprobs=logprobs, squares=squares)
    first = (1.0 * energy[0] + 3.0 * energy[2]) / (energy[0] + energy[2] + 1e-8)
    second_weights = energy[0] + energy[1], energy[2] + energy[3]
    second = (1.0 * second_weights[0] + 3.0 * second_weights[1]) / (sum(second_weights) + 1e-8)
    # Only the longer sample has a third token: no baseline.
    expected = [1 - first, 1 - second, 3 - first, 3 - second, 3.0]
    np.testing.assert_allclose(optimal_token(given), expected, rtol=1e-12)
    np.testing.assert_allclose(optimal_turn(given), expected, rtol=1e-12)


def test_optimal_baseline_by_turn_aligns_trained_tokens() -> None:
    mask = np.array([True, False, False, True, True, True])
    lengths, rewards = np.array([4, 2]), np.array([1.0, 3.0])
    logprobs, squares = np.full(6, np.log(0.5)), np.full(6, 0.5)
    given = Group(rewards=rewards, lengths=lengths, loss_mask=mask, logprobs=logprobs, squares=squares)
    # All energies are 0.5, so the baseline is the mean where both samples have a token.
    np.testing.assert_allclose(optimal_turn(given), [-1, 0, 0, -1, 1, 1], rtol=1e-7)
    # By position, the samples meet at the first token only.
    np.testing.assert_allclose(optimal_token(given), [-1, 0, 0, 1, 1, 3], rtol=1e-7)


def test_missing_inputs_are_named() -> None:
    with pytest.raises(ValueError, match=r"no values.*needs 'values'"):
        gae(Group(rewards=np.ones(1), lengths=np.array([1])))
    with pytest.raises(ValueError, match=r"no lengths.*needs 'tokens'"):
        returns(Group(rewards=np.ones(1)))


def test_squared_probabilities_are_those_of_the_softmax_in_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 5
    expected = (logits / 0.7).softmax(-1).square().sum(-1)
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 23)
    torch.testing.assert_close(vocabulary.squared_probabilities(logits, 0.7), expected, rtol=1e-12, atol=0)
    single = vocabulary.squared_probabilities(logits.bfloat16()[None], 1.0)
    assert (single.shape, single.dtype) == ((1, 7), torch.float32)
