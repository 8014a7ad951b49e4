"""[algorithm.options]: options of a user's algorithm functions, typed by their signatures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from relax_actors.algorithms.advantages.estimation import estimator_of
from relax_actors.algorithms.advantages.groups import Group
from relax_actors.algorithms.policy_functions import PolicyFunctions
from relax_actors.checks import examine
from relax_actors.config import load_config
from tests.support.running import TINY

OWN = "tests.support.own_options"
LOSS = f"algorithm.surrogate={OWN}.damped"


def errors(tmp_path: Path, *settings: str) -> list[str]:
    config = load_config(TINY, [f"run.folder={tmp_path / 'run'}", "algorithm.proximal=trainer", *settings])
    return [line for error in examine(config).errors for line in error.splitlines()]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([LOSS], ["algorithm.options.strength", "is missing", "damped"]),
        ([LOSS, "algorithm.options.strength=high"], ["algorithm.options.strength", "number", "'high'"]),
        ([LOSS, "algorithm.options.strength=1", "algorithm.options.kind=c"], ["algorithm.options.kind", "'a' or 'b'"]),
        (
            [LOSS, "algorithm.options.strength=1", "algorithm.options.strenght=1"],
            ["algorithm.options.strenght", "unknown option of damped", "did you mean 'strength'"],
        ),
        (
            [LOSS, "algorithm.options.strength=1", "algorithm.options.clip_high=1"],
            ["algorithm.options.clip_high", "is a setting", "set algorithm.clip_high"],
        ),
        (["algorithm.options.strength=1"], ["algorithm.options.strength", "built-in functions take no options"]),
    ],
)
def test_options_that_a_function_cannot_take_are_refused(tmp_path: Path, settings: list[str], words: list[str]) -> None:
    (error,) = errors(tmp_path, *settings)
    for word in words:
        assert word in error


def test_settings_are_given_to_keyword_only_parameters_by_name(tmp_path: Path) -> None:
    own = f"algorithm.correction.kind={OWN}.bounded_by_one"
    assert errors(tmp_path, own) == []
    logprobs, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    functions = PolicyFunctions(load_config(TINY, [own]).algorithm)
    assert functions.weights(logprobs, logprobs + 1, mask).weight.tolist() == [[pytest.approx(np.exp(-1))] * 2]


def test_each_function_takes_its_own_options(tmp_path: Path) -> None:
    settings = [
        LOSS,
        "algorithm.options.strength=2",
        f"algorithm.correction.kind={OWN}.bounded",
        "algorithm.options.most=0.5",
        f"algorithm.advantage={OWN}.spread",
        "algorithm.options.factor=3",
    ]
    assert errors(tmp_path, *settings) == []
    algorithm = load_config(TINY, settings).algorithm
    estimator, _ = estimator_of(algorithm)
    assert estimator(Group(rewards=np.array([0.0, 2.0]))).tolist() == [-3.0, 3.0]
    logprobs, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    assert PolicyFunctions(algorithm).weights(logprobs, logprobs - 1, mask).weight.tolist() == [[0.5, 0.5]]
