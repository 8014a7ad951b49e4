"""Settings of [algorithm.pairs]: those that none of the losses reads are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from relax_actors.algorithms.pair_losses import PAIR_LOSSES, PairSums
from relax_actors.algorithms.refusals import refusals
from relax_actors.config import load_config
from relax_actors.config.algorithm_parts import PAIR_SETTINGS, PairLoss, PairsSection

DPO = Path(__file__).parents[2] / "examples" / "dpo" / "dpo.toml"

CHANGED: dict[str, Any] = {
    "label_smoothing": 0.3,
    "tau": 0.7,
    "gamma": 0.9,
    "alpha": 0.5,
    "f_divergence": "js",
    "f_alpha": 0.9,
}


def value_of(loss: str, **settings: Any) -> torch.Tensor:
    """Return a loss of two pairs."""
    sums = [torch.tensor(numbers) for numbers in ([-5.0, -3.0], [-6.0, -8.0], [-4.0, -4.0], [-7.0, -6.0])]
    pairs = PairSums(*sums, torch.tensor([3.0, 2.0]), torch.tensor([4.0, 5.0]), sums[0], 0.5, 1.0, -0.5, 0.5)
    return PAIR_LOSSES[loss](pairs, PairsSection.model_validate({"label_smoothing": 0.1, **settings}))


@pytest.mark.parametrize("loss", get_args(PairLoss))
def test_losses_read_the_settings_of_their_table(loss: str) -> None:
    read = set()
    for name, value in CHANGED.items():
        others = {"f_divergence": "alpha"} if name == "f_alpha" else {}
        if not torch.equal(value_of(loss, **others), value_of(loss, **others, **{name: value})):
            read.add(name)
    assert read == {name for name, losses in PAIR_SETTINGS.items() if loss in losses}


@pytest.mark.parametrize(
    ("settings", "key", "cause"),
    [
        (["pairs.f_divergence=js"], "f_divergence", 'pairs.losses of "simpo"; add "sigmoid"'),
        (["pairs.tau=0.5"], "tau", 'pairs.losses of "simpo"; add "discopop"'),
        (["pairs.losses={sigmoid = 1.0}", "pairs.f_alpha=0.7"], "f_alpha", 'pairs.f_divergence = "reverse_kl"'),
        (["pairs.losses={sigmoid = 1.0}", "pairs.alpha=0.7"], "alpha", 'pairs.losses of "sigmoid"; add "cpo" or'),
    ],
)
def test_settings_that_no_loss_of_the_run_reads_are_refused(settings: list[str], key: str, cause: str) -> None:
    overrides = ["algorithm.name=simpo", *(f"algorithm.{setting}" for setting in settings)]
    lines = [line for line in refusals(load_config(DPO, overrides)) if key in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"algorithm.pairs.{key} = ")
    assert f"has no effect with algorithm.{cause}" in lines[0]


def test_settings_that_one_of_several_losses_reads_are_accepted() -> None:
    overrides = ["algorithm.name=simpo", "algorithm.pairs.losses={simpo = 1.0, discopop = 0.5}"]
    overrides.append("algorithm.pairs.tau=0.5")
    assert list(refusals(load_config(DPO, overrides))) == []
