"""VAPO's advantages, returns and imitation against a plain reading of the paper (arXiv 2504.05118)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from relax_actors.algorithms.advantages.groups import Group
from relax_actors.algorithms.advantages.returns import critic_targets, gae
from relax_actors.algorithms.evaluate.kinds import evaluate
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.engines.torch.loss_inputs import LossInputs
from relax_actors.engines.torch.objective import StepObjective
from relax_actors.messages import Advantage
from relax_actors.training.auxiliary_terms import with_auxiliary_terms
from relax_actors.training.step_rows import StepRows
from tests.unit.test_advantages_role import trajectory

LENGTHS, REWARDS = [3, 1, 40], [1.0, 0.0, 1.0]


def drawn() -> Group:
    random = np.random.default_rng(1)
    total = sum(LENGTHS)
    return Group(rewards=np.array(REWARDS), lengths=np.array(LENGTHS), values=random.normal(size=total))


def by_definition(values: np.ndarray, reward: float, lam: float) -> list[float]:
    """Sum of lam^k delta_(t + k), with the reward at the last token and a value of 0 after it."""
    n = len(values)
    later = [*values[1:], 0.0]
    deltas = [(reward if t == n - 1 else 0.0) + later[t] - values[t] for t in range(n)]
    return [sum(lam**k * deltas[t + k] for k in range(n - t)) for t in range(n)]


def each(group: Group, lambdas: list[float]) -> np.ndarray:
    parts = np.split(group.input("values"), np.cumsum(LENGTHS)[:-1])
    return np.concatenate([by_definition(v, r, lam) for v, r, lam in zip(parts, REWARDS, lambdas, strict=True)])


def test_lambda_of_a_sample_follows_from_its_length() -> None:
    # 1 - 1 / (0.05 x 40) = 0.5; shorter samples would have a negative lambda, which is 0.
    np.testing.assert_allclose(gae(drawn(), gae_alpha=0.05), each(drawn(), [0.0, 0.0, 0.5]), atol=1e-12)
    np.testing.assert_allclose(gae(drawn(), gae_alpha=1.0), each(drawn(), [2 / 3, 0.0, 39 / 40]), atol=1e-12)


def test_critic_learns_returns_of_its_own_lambda() -> None:
    group = drawn()
    advantages = gae(group, gae_lambda=0.5)
    decoupled = critic_targets(group, advantages, gamma=1.0, critic_lambda=1.0)
    np.testing.assert_allclose(decoupled, np.repeat(REWARDS, LENGTHS), atol=1e-12)  # whole returns
    coupled = critic_targets(group, advantages, gamma=1.0, critic_lambda=None)
    np.testing.assert_allclose(coupled, each(group, [0.5] * 3) + group.input("values"), atol=1e-12)


def test_evaluated_returns_are_those_of_the_lambda_of_the_critic() -> None:
    case = {
        "kind": "advantage",
        "name": "gae",
        "settings": {"gae_lambda": 0.0, "critic_lambda": 1.0},
        "inputs": {"rewards": [1.0], "values": [[0.5, 0.25]]},
    }
    (found,) = evaluate([case])
    assert found["outputs"] == {"advantages": [[-0.25, 0.75]], "returns": [[1.0, 1.0]]}


def test_correct_samples_add_the_mean_of_their_negative_log_probs() -> None:
    algorithm = AlgorithmSection.model_validate({"positive_nll": 0.3})
    row = trajectory([2, 3, 1])
    advantage = Advantage(np.array([0.5, -0.5, 0.1], np.float32), 0.5, correct=np.array([True, False, True]))
    rows = with_auxiliary_terms(StepRows([0], [row], [advantage]), algorithm)
    samples = rows.samples()
    width = 3
    mask = torch.arange(width) < torch.tensor([[2], [3], [1]])
    new = (
        -torch.rand(3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) - 0.1
    ).requires_grad_()
    imitated = torch.zeros(3, width, dtype=torch.float64)
    for i, sample in enumerate(samples):
        imitated[i, : sample.trained] = torch.from_numpy(sample.masked("imitated").astype(np.float64))
    plain = LossInputs(new, new.detach(), torch.ones(3, width, dtype=torch.float64), mask)
    losses = []
    for inputs in (replace(plain, imitated=imitated), plain):
        objective = StepObjective(algorithm)
        loss, measured = objective.loss(inputs)
        losses.append(loss * objective.gradient_scale(measured))
    nll = -(new[0, :2].sum() + new[2, 0]) / 3
    torch.testing.assert_close(losses[0] - losses[1], 0.3 * nll, rtol=1e-6, atol=1e-7)


def test_step_without_a_correct_sample_imitates_none() -> None:
    row = trajectory([2, 3])
    advantage = Advantage(np.zeros(2, np.float32), 0.0, correct=np.array([False, False]))
    rows = with_auxiliary_terms(StepRows([0], [row], [advantage]), AlgorithmSection(positive_nll=0.1))
    assert [sample.imitated for sample in rows.samples()] == [None, None]


def test_correct_samples_are_flags() -> None:
    with pytest.raises(ValueError, match=r"float64\[2\], not \[n\] bool"):
        Advantage(np.zeros(2, np.float32), 0.0, correct=np.zeros(2))
