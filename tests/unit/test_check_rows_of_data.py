"""Checks of runs without a rollout: what the stage is, what of the first rows is trained, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_actors.algorithms.refusals import refusals
from relax_actors.checks import examine
from relax_actors.checks.examine import Findings
from relax_actors.config import load_config
from relax_actors.data.epochs import with_epochs
from relax_actors.errors import ConfigError
from relax_actors.roles import role_names
from tests.support.running import SUPPORT

TINY = SUPPORT / "tiny_examples.toml"


def found(*settings: str) -> Findings:
    return examine(with_epochs(load_config(TINY, list(settings))))


def of_file(folder: Path, *rows: object, settings: tuple[str, ...] = ()) -> Findings:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found("data.kind=jsonl", f"data.path={path}", *settings)


def test_stage_and_first_row_are_shown() -> None:
    notes = found().notes
    assert any("no rollout" in note and "8 examples" in note for note in notes)
    assert any("00>⟦0#⟧" in note for note in notes)
    config = load_config(TINY, ["algorithm.name=dpo", "roles.reference.replicas=1"])
    assert sorted(role_names(config)) == ["examples", "prompts", "reference", "trainer"]


def test_share_of_trained_tokens_and_bad_rows_are_noted(tmp_path: Path) -> None:
    rows = [{"prompt": "1234>", "answer": "12"}, {"prompt": "1>"}, {"prompt": "1>", "answer": "x"}]
    notes = of_file(tmp_path, *rows).notes
    assert any("2 of the first 3 rows will be quarantined" in note and "row 2" in note for note in notes)
    assert any("38% of their tokens are trained" in note for note in notes)


def test_data_without_a_row_that_can_be_trained_is_refused(tmp_path: Path) -> None:
    errors = of_file(tmp_path, {"prompt": "1>"}, {"prompt": "2>"}).errors
    assert any("none of the first 2 rows" in error and "no answer" in error for error in errors)


@pytest.mark.parametrize("section", ["rollout.group_size=2", "reward.function=numeric_match", "eval.reward=x.y"])
def test_section_of_sampled_rows_is_refused(section: str) -> None:
    held_out = ["eval.data.kind=python", "eval.data.function=tiny_tasks.make"]
    with pytest.raises(ConfigError, match=r"has no effect.*examples"):
        load_config(TINY, [section, *held_out])


def test_section_of_rows_from_data_is_refused_in_a_run_that_samples() -> None:
    with pytest.raises(ConfigError, match=r"\[examples\] has no effect.*sampled"):
        load_config(SUPPORT / "tiny.toml", ["examples.train=all"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["algorithm.surrogate=clip"], 'a loss of rows = "sampled"'),
        (["algorithm.correction.kind=tis"], "correction.kind"),
        (["algorithm.name=dpo", "algorithm.aggregate=token_mean"], "sample_mean_of_sums"),
        (["trainer.router_replay=true"], "router_replay"),
    ],
)
def test_what_only_sampled_rows_have_is_refused(settings: list[str], said: str) -> None:
    assert any(said in line for line in refusals(load_config(TINY, settings)))


def test_exo_without_label_smoothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="label_smoothing"):
        load_config(TINY, ["algorithm.name=dpo", "algorithm.pairs.losses={exo_pair=1.0}"])


def test_epochs_set_steps_and_rows_and_steps_may_shorten_them() -> None:
    config = with_epochs(load_config(TINY, ["run.epochs=3"]))
    assert (config.run.steps, config.run.rows) == (12, 90)
    config = with_epochs(load_config(TINY, ["run.epochs=3", "run.steps=5"]))
    assert (config.run.steps, config.run.rows) == (5, 40)
    with pytest.raises(ConfigError, match=r"run\.rows.*leave it out"):
        with_epochs(load_config(TINY, ["run.rows=7"]))
