"""The autoscaler on modelled loads, against the best fixed number of engines."""

from __future__ import annotations

import json

import pytest

from relax_actors.autoscaling.loads import LOADS, Load, best_fixed, flapping, run_fixed, run_scaled
from relax_actors.cli.modelled_loads import show_loads
from relax_actors.config.autoscaler import AutoscalerSection
from relax_actors.errors import ConfigError
from tests.support.running import TINY

SECTION = AutoscalerSection(max=8)
ROWS, ADMITTED = 16, 128
BY_NAME = {load.name: load for load in LOADS}


def test_enough_engines_never_starve_the_trainer_and_too_few_starve_it_by_their_share() -> None:
    steady = Load("steady", lambda _: 0.25)  # two of eight engines
    assert run_fixed(steady, ROWS, ADMITTED, 3).starved < 0.01
    assert run_fixed(steady, ROWS, ADMITTED, 1).starved == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("name", "starved", "share"),
    [("steady", 0.01, 1.1), ("burst", 0.02, 0.7), ("slow leak", 0.01, 0.9), ("engine deaths", 0.03, 1.1)],
)
def test_trainer_hardly_starves_with_about_the_engine_hours_of_the_best_fixed_size(
    name: str, starved: float, share: float
) -> None:
    outcome = run_scaled(BY_NAME[name], ROWS, ADMITTED, SECTION)
    _, fixed = best_fixed(BY_NAME[name], ROWS, ADMITTED, SECTION.max)
    assert outcome.starved <= starved
    assert outcome.engine_hours <= share * fixed.engine_hours
    assert outcome.changes_an_hour <= 3


@pytest.mark.parametrize("minutes", [3, 5, 10, 15, 20, 30, 45])
def test_load_that_comes_and_goes_causes_at_most_three_changes_an_hour(minutes: float) -> None:
    outcome = run_scaled(flapping(minutes), ROWS, ADMITTED, SECTION)
    assert outcome.changes_an_hour <= 3
    assert outcome.starved < 0.05


def test_command_prints_the_table_and_refuses_a_configuration_without_the_section(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match="needs a section"):
        show_loads(TINY, [], as_json=True)
    assert show_loads(TINY, ["autoscaler.max=4", "run.steps=1"], as_json=True) == 0
    lines = json.loads(capsys.readouterr().out)["loads"]
    assert [line["load"] for line in lines] == list(BY_NAME)
    assert all(line["most_changes_an_hour"] <= 3 for line in lines)
