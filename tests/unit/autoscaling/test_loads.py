"""The autoscaler on modelled loads, against the best fixed number of engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_actors.autoscaling.loads import LOADS, Load, flapping, run_fixed, run_scaled
from relax_actors.cli.modelled_loads import rows_of, show_loads
from relax_actors.config.autoscaler import AutoscalerSection
from relax_actors.errors import ConfigError
from tests.support.running import TINY

SECTION = AutoscalerSection(max=8)
ROWS, ADMITTED = 16, 128
BY_NAME = {load.name: load for load in LOADS}
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "autoscaling.md"


@pytest.fixture(scope="module")
def lines() -> dict[str, dict[str, Any]]:
    """Figures of `relax simulate --autoscaler` by load, with the settings of the page."""
    return {str(line["load"]): line for line in rows_of(SECTION, ROWS, ADMITTED)}


def test_enough_engines_never_starve_the_trainer_and_too_few_starve_it_by_their_share() -> None:
    steady = Load("steady", lambda _: 0.25)  # two of eight engines
    assert run_fixed(steady, ROWS, ADMITTED, 3).starved < 0.01
    assert run_fixed(steady, ROWS, ADMITTED, 1).starved == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("name", "starved", "share"),
    [("steady", 0.01, 1.1), ("burst", 0.02, 0.7), ("slow leak", 0.01, 0.9), ("engine deaths", 0.03, 1.1)],
)
def test_trainer_hardly_starves_with_about_the_engine_hours_of_the_best_fixed_size(
    lines: dict[str, dict[str, Any]], name: str, starved: float, share: float
) -> None:
    line = lines[name]
    assert line["starved"] <= starved
    assert line["engine_hours"] <= share * line["fixed_engine_hours"]
    assert line["most_changes_an_hour"] <= 3


def test_table_of_the_page_is_what_the_command_prints(lines: dict[str, dict[str, Any]]) -> None:
    cells = [[cell.strip() for cell in row.strip("|\n").split("|")] for row in PAGE.read_text().splitlines()]
    shown = {row[0]: row[1:] for row in cells if row[0] in lines and len(row) == 7}
    assert shown == {
        name: [
            f"{line['starved']:.1%}",
            f"{line['engine_hours']}",
            f"{line['changes']}, {line['most_changes_an_hour']}",
            f"{line['fixed_size']}",
            f"{line['fixed_starved']:.1%}",
            f"{line['fixed_engine_hours']}",
        ]
        for name, line in lines.items()
    }


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
