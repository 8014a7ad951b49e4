"""`relax check` runs the algorithm functions of the user on made-up steps and groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_actors.checks import Findings, examine
from relax_actors.config import load_config
from tests.support.messages import assert_says
from tests.support.running import TINY

OWN = "tests.support.wrong_losses"
LOSS, CORRECTION, ADVANTAGE = (f"algorithm.{name}" for name in ("surrogate", "correction.kind", "advantage"))
FILE = Path(__file__).parents[1] / "support" / "wrong_losses.py"
STEP, GROUP = " (tried on a made-up step)", " (tried on a made-up group of 2, equal rewards)"
BOUND = "bound logarithms, divisions and exponentials, e.g. log_ratio.clamp(-20, 20)"
FLAGS = "give one bool for each token, [6, 9]"


def checked(tmp_path: Path, *settings: str) -> Findings:
    return examine(load_config(TINY, [f"run.folder={tmp_path / 'run'}", "algorithm.proximal=trainer", *settings]))


def line_of(text: str) -> int:
    """Number of the line of `wrong_losses.py` that holds a text."""
    return next(i for i, line in enumerate(FILE.read_text().splitlines(), 1) if text in line)


MESSAGES = {
    (LOSS, "of_samples"): f"returned shape [6] for tokens of shape [6, 9]; return one value for each token{STEP}",
    (LOSS, "not_a_number"): f"returned nan for 22 of 22 tokens of a micro-batch; {BOUND}{STEP}",
    (LOSS, "without_gradient"): (
        f"returned a loss without gradient; compute it from inputs.logprobs or inputs.ratio{STEP}"
    ),
    (LOSS, "failing"): (
        f"raised LookupError: no such baseline ({FILE}, line {line_of('raise LookupError')}); fix the function{STEP}"
    ),
    (LOSS, "infinite_slope"): (
        "returned a finite loss with a gradient of nan for 1 of 22 tokens; bound square roots, powers and divisions "
        f"whose gradient is not finite, e.g. (x * x + 1e-12).sqrt(){STEP}"
    ),
    (LOSS, "one_flag"): f"returned a PolicyLoss with clipped torch.bool[6]; {FLAGS}{STEP}",
    (LOSS, "flags_of_numbers"): f"returned a PolicyLoss with clipped torch.float32[6, 9]; {FLAGS}{STEP}",
    (CORRECTION, "infinite_weights"): f"returned inf for 22 of 22 tokens of a micro-batch; {BOUND}{STEP}",
    (ADVANTAGE, "pairs"): (
        f"returned float64[2, 2]; it must return [2], one number per sample or [3], one per token{GROUP}"
    ),
    (ADVANTAGE, "share_of_rewards"): f"returned nan at index 0 of 2; it must return finite numbers{GROUP}",
    (ADVANTAGE, "absent_component"): (
        f"raised KeyError: 'fluency' ({FILE}, line {line_of('fluency')}); fix the function{GROUP}"
    ),
    (ADVANTAGE, "broadcast"): (
        "raised ValueError: operands could not be broadcast together with shapes (2,) (3,)  "
        f"({FILE}, line {line_of('group.n + 1')}); fix the function (tried on 12 made-up groups, which were all "
        "refused)"
    ),
}


@pytest.mark.parametrize(("setting", "name"), MESSAGES)
def test_functions_that_cannot_train_are_refused(tmp_path: Path, setting: str, name: str) -> None:
    message = f"{setting} = '{OWN}.{name}' {MESSAGES[setting, name]}"
    assert checked(tmp_path, f"{setting}={OWN}.{name}").errors == (message,)


@pytest.mark.parametrize(
    ("setting", "name", "said"),
    [
        (LOSS, "choosing_numbers", ["choose returned float32[22]", "one bool for each token, [22]", STEP]),
        (LOSS, "failing_choice", ["choose raised TypeError", "'covariance'", STEP]),
        (LOSS, "with_facts_of_an_estimator", ["spec of with_facts_of_an_estimator", "AdvantageSpec", "@LossSpec(...)"]),
        (ADVANTAGE, "with_facts_of_a_loss", ["spec of with_facts_of_a_loss", "LossSpec", "@AdvantageSpec(...)"]),
    ],
)
def test_facts_and_choices_that_cannot_be_used_are_refused(
    tmp_path: Path, setting: str, name: str, said: list[str]
) -> None:
    (error,) = checked(tmp_path, f"{setting}={OWN}.{name}").errors
    assert error.startswith(f"{setting} = '{OWN}.{name}'")
    assert [text for text in said if text not in error] == []


def test_an_estimator_that_refuses_some_groups_is_noted(tmp_path: Path) -> None:
    found = checked(tmp_path, f"{ADVANTAGE}={OWN}.only_varied")
    assert found.errors == ()
    assert_says(
        " ".join(found.notes),
        f"{ADVANTAGE} = '{OWN}.only_varied'",
        "6 of 12",
        "group of 2",
        "rewards are equal",
        "quarantined",
    )


def test_a_loss_that_depends_on_the_cut_into_micro_batches_is_refused(tmp_path: Path) -> None:
    (error,) = checked(tmp_path, f"{LOSS}={OWN}.of_the_micro_batch").errors
    assert error.startswith(f"{LOSS} = '{OWN}.of_the_micro_batch'")
    assert "micro-batches" in error
    assert "inputs.step_sum" in error


def test_a_correction_that_depends_on_the_cut_into_micro_batches_is_refused(tmp_path: Path) -> None:
    (error,) = checked(tmp_path, f"{CORRECTION}={OWN}.weights_of_the_micro_batch").errors
    assert error.startswith(f"{CORRECTION} = '{OWN}.weights_of_the_micro_batch'")
    assert "micro-batches" in error
    assert "sequence alone" in error


def test_functions_that_train_are_accepted(tmp_path: Path) -> None:
    for own in (f"{CORRECTION}={OWN}.weights", f"{LOSS}={OWN}.without_fault"):
        assert checked(tmp_path, own).errors == ()
