"""Factors of the terms beside the policy loss that are means over other tokens than its own.

The engine divides the loss of an update once, by the tokens, samples or prompts of its policy loss. A term that is a
mean over other tokens therefore gets the factor `coefficient x divisor / number of these tokens`, which is known when
all rows of the update are there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.training.samples import observed_tokens

if TYPE_CHECKING:
    from relax_actors.training.step_rows import StepRows


def with_auxiliary_terms(rows: StepRows, algorithm: AlgorithmSection) -> StepRows:
    """Return a copy of the rows of an update with the factors of its terms.

    - `positive_nll`: mean -log-prob over the tokens of correct samples (arXiv 2504.05118).
    - `observation_nll`: mean -log-prob over the tokens of observations (ECHO, arXiv 2605.24517).
    """
    terms = replace(rows.terms, imitation=_imitation(rows, algorithm), observation=_observation(rows, algorithm))
    return replace(rows, terms=terms)


def _imitation(rows: StepRows, algorithm: AlgorithmSection) -> float:
    if not algorithm.positive_nll:
        return 0.0
    correct = 0
    for trajectory, advantage in zip(rows.trajectories, rows.advantages, strict=True):
        if advantage.correct is not None:
            correct += int(trajectory.trained_lengths[advantage.correct].sum())
    return algorithm.positive_nll * rows.tokens / correct if correct else 0.0


def _observation(rows: StepRows, algorithm: AlgorithmSection) -> float:
    if not algorithm.observation_nll:
        return 0.0
    observed = sum(int(np.count_nonzero(observed_tokens(each))) for each in rows.trajectories)
    return algorithm.observation_nll * _divisor(rows, algorithm) / observed if observed else 0.0


def _divisor(rows: StepRows, algorithm: AlgorithmSection) -> float:
    """Return the divisor of the update's loss; see `StepObjective.gradient_scale`."""
    lengths = [trajectory.trained_lengths for trajectory in rows.trajectories]
    match algorithm.aggregate:
        case "token_mean":
            return float(rows.tokens)
        case "prompt_mean":
            return float(sum(bool(own.any()) for own in lengths))
        case "constant":
            return float(sum(int(np.count_nonzero(own)) for own in lengths) * (algorithm.length or 1))
        case _:
            return float(sum(int(np.count_nonzero(own)) for own in lengths))
