"""ECHO: the policy loss of sampled tokens, and the mean -log-prob of observations behind them (arXiv 2605.24517)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_actors.algorithms.refusals import refusals
from relax_actors.config import load_config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.engines.torch.loss_inputs import LossInputs
from relax_actors.engines.torch.objective import StepObjective
from relax_actors.messages import Advantage, Sample, TokenSequence, Trajectory
from relax_actors.training.auxiliary_terms import with_auxiliary_terms
from relax_actors.training.samples import observed_tokens
from relax_actors.training.step_rows import StepRows

EXAMPLES = Path(__file__).parents[2] / "examples"
PICK = EXAMPLES / "agents" / "pick.toml"
PROMPT = np.array([1, 2], np.int32)
AGGREGATES = ("token_mean", "prompt_mean", "sample_mean_of_means", "sample_mean_of_sums", "constant")


def sequence(kinds: str) -> TokenSequence:
    """Build a sequence behind the prompt: `t` is a trained token, `s` is only sampled, `o` is of an observation."""
    n = len(PROMPT)
    whole = np.array([*"o" * n, *kinds])
    return TokenSequence(
        np.arange(1, len(whole) + 1, dtype=np.int32),
        whole == "t",
        np.where(whole == "o", 0, -1).astype(np.float32),
        np.where(whole == "o", -1, 0).astype(np.int32),
    )


def rows_of(*rows: tuple[tuple[str, ...], ...]) -> StepRows:
    """Build rows of samples of sequences."""
    trajectories = [Trajectory.of(PROMPT, [Sample(tuple(map(sequence, sample))) for sample in row]) for row in rows]
    advantages = [Advantage(np.linspace(-1, 1, len(row)).astype(np.float32), 0.5) for row in rows]
    return StepRows([*range(len(rows))], trajectories, advantages)


def test_observations_behind_a_trained_token_are_found_in_each_sequence() -> None:
    (whole,) = rows_of((("ottoot", "sosto"), ("too",))).trajectories
    expected = [False, False, False, True, True, False, *[False] * 4, True, False, True, True]
    assert observed_tokens(whole).tolist() == expected


def loss_of(rows: StepRows, logprobs: torch.Tensor, algorithm: AlgorithmSection) -> torch.Tensor:
    """Return the loss of a step of one update, from the log-probs of its trained and observed tokens, in order."""
    samples = rows.samples()
    width = max(sample.trained for sample in samples)
    mask = torch.arange(width) < torch.tensor([[sample.trained] for sample in samples])

    def padded(name: str) -> torch.Tensor:
        found = torch.zeros(mask.shape, dtype=torch.float64)
        found[mask] = torch.from_numpy(np.concatenate([sample.masked(name).astype(np.float64) for sample in samples]))
        return found

    own = torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, logprobs)
    columns: dict[str, Any] = {}
    if samples[0].observed is not None:
        columns = {"observed": padded("observed") > 0, "imitated": padded("imitated")}
    counts = torch.tensor([sample.sample_tokens for sample in samples])
    of_rows = torch.tensor([sample.row_tokens for sample in samples])
    inputs = LossInputs(own, padded("logprobs"), padded("advantages"), mask, counts, of_rows, **columns)
    objective = StepObjective(algorithm)
    loss, measured = objective.loss(inputs)
    return loss * objective.gradient_scale(measured)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_loss_is_that_of_the_policy_and_the_mean_over_observations(aggregate: str) -> None:
    rows = rows_of((("tootot", "sto"), ("t",)), (("ttoo",), ("ot",)))
    algorithm = AlgorithmSection.model_validate(
        {"observation_nll": 0.3, "aggregate": aggregate, "length": 7, "kl": {"place": "loss", "kind": "k3"}}
    )
    trained = np.concatenate([each.trained for each in rows.trajectories])
    observed = np.concatenate([observed_tokens(each) for each in rows.trajectories])
    random = torch.Generator().manual_seed(3)
    every = (-torch.rand(len(trained), dtype=torch.float64, generator=random) - 0.5).requires_grad_()
    whole = loss_of(with_auxiliary_terms(rows, algorithm), every[torch.from_numpy(trained | observed)], algorithm)
    policy = loss_of(rows, every[torch.from_numpy(trained)], algorithm)
    expected = policy - 0.3 * every[torch.from_numpy(observed)].mean()
    torch.testing.assert_close(whole, expected, rtol=1e-6, atol=1e-7)
    both = [torch.autograd.grad(loss, every, retain_graph=True)[0] for loss in (whole, expected)]
    torch.testing.assert_close(*both, rtol=1e-6, atol=1e-7)


def test_unlikely_observations_leave_the_policy_loss_finite() -> None:
    rows = rows_of((("too",), ("tt",)))
    algorithm = AlgorithmSection.model_validate({"observation_nll": 0.1, "kl": {"place": "loss", "kind": "k3"}})
    logprobs = torch.tensor([-1.0, -2000.0, -2000.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    loss = loss_of(with_auxiliary_terms(rows, algorithm), logprobs, algorithm)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(200, abs=1)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_step_without_observations_is_trained_as_without_the_term() -> None:
    rows = rows_of((("tt",), ("t",)))
    found = with_auxiliary_terms(rows, AlgorithmSection(observation_nll=0.1))
    assert all(sample.observed is None for sample in found.samples())
    assert [sample.trained for sample in replace(found, terms=replace(found.terms, observation=0.5)).samples()] == [
        2,
        1,
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["algorithm.name=echo"], ""),
        (["algorithm.name=gspo", "algorithm.observation_nll=0.05"], 'algorithm.ratio = "sequence_mean" reads whole'),
        (["algorithm.name=p3o", "algorithm.observation_nll=0.05"], 'algorithm.surrogate = "p3o" reads whole'),
        (["algorithm.name=echo", "algorithm.entropy.quantile=0.5"], "algorithm.entropy.quantile = 0.5 reads whole"),
        (
            ["algorithm.name=echo", "algorithm.proximal=trainer", "algorithm.reject.kind=geometric"],
            "set algorithm.reject.counted = true",
        ),
    ],
)
def test_combinations_without_a_meaning_are_refused(settings: list[str], says: str) -> None:
    found = [line for line in refusals(load_config(PICK, settings)) if "observation_nll" in line]
    assert any(says in line for line in found) if says else not found, found


def test_completions_have_no_observations_to_train() -> None:
    config = load_config(EXAMPLES / "demo" / "demo.toml", ["algorithm.name=echo"])
    assert any("add [environment] or [agent]" in line for line in refusals(config))
