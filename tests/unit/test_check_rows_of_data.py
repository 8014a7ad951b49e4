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
SCORES = "algorithm.name=reward_model"


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


def test_only_examples_are_split() -> None:
    with pytest.raises(ConfigError, match=r"oversize.*split.*pairs"):
        load_config(TINY, ["algorithm.name=dpo", "data.oversize=split"])


def test_section_of_rows_from_data_is_refused_in_a_run_that_samples() -> None:
    with pytest.raises(ConfigError, match=r"record\.entropy has no effect: no policy samples"):
        load_config(TINY, ["record.entropy=true"])
    with pytest.raises(ConfigError, match=r"\[examples\] has no effect.*sampled"):
        load_config(SUPPORT / "tiny.toml", ["examples.train=all"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["algorithm.surrogate=clip"], 'a loss of rows = "sampled"'),
        (["algorithm.correction.kind=tis"], "correction.kind"),
        (["algorithm.name=dpo", "algorithm.aggregate=token_mean"], "sample_mean_of_sums"),
        (["trainer.router_replay=true"], "router_replay"),
        (["algorithm.surrogate=bradley_terry", "algorithm.rows=pairs"], 'a loss of head = "scores"'),
        (["algorithm.name=dpo", "algorithm.head=scores"], 'a loss of head = "tokens"'),
        ([SCORES, "algorithm.scores.classes=2"], "scores.classes"),
        ([SCORES, "examples.train=all"], "examples.train"),
        ([SCORES, "trainer.warm_start.steps=1"], "warm_start"),
        ([SCORES, "algorithm.kl.place=loss"], "kl.place"),
        ([SCORES, "algorithm.entropy.coefficient=0.1"], "algorithm.entropy"),
        ([SCORES, "algorithm.pairs.beta=0.3"], "pairs.beta"),
        (["algorithm.name=outcome_reward", "algorithm.scores.centring=0.1"], "scores.centring"),
        (["algorithm.name=dpo", "algorithm.scores.centring=0.1"], "scores.centring"),
        (["algorithm.head=scores"], "loss of head"),
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


def test_scores_of_a_reward_model_are_shown_where_they_are_read() -> None:
    notes = found(SCORES, "data.function=tiny_tasks.pairs").notes
    assert any("60 scores are trained" in note for note in notes)
    assert any("⟦0#⟧" in note and "scored" in note for note in notes)
    steps = ("algorithm.name=process_reward", "data.function=tiny_tasks.processes", "examples.step_separator='#'")
    notes = found(*steps).notes
    assert any("0>0⟦#⟧0⟦#⟧" in note for note in notes)
    assert not any("stop token" in note for note in notes)


@pytest.mark.slow
def test_architecture_without_a_sequence_classifier_is_refused() -> None:
    errors = found(SCORES, "data.function=tiny_tasks.pairs", "model.architecture.model_type=cohere").errors
    assert any("cohere" in error and "sequence-classification" in error for error in errors)
