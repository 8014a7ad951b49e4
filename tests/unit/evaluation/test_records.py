"""Files of evaluations, and the figures of their answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relax_actors.errors import ConfigError
from relax_actors.evaluation.collect import vote_of
from relax_actors.evaluation.figures import figures_of
from relax_actors.evaluation.records import (
    Answer,
    Evaluated,
    Record,
    SetFacts,
    read_evaluation,
    versions_in,
    write_evaluation,
)


def record(n: int, rewards: list[float], *, category: str = "", name: str = "sums", problem: str = "") -> Record:
    answers = [Answer(f"{reward}", reward, 3, "stop", f"{reward}") for reward in rewards]
    return Record(f"eval.0.{n}", name, category, f"question {n}", "1.0", answers, problem=problem)


def evaluated(records: list[Record], **facts: object) -> Evaluated:
    return Evaluated("run", 0, "f" * 32, {"sums": SetFacts(**facts)}, records)  # type: ignore[arg-type]


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "evaluations" / "7.jsonl"
    talk = Record("eval.7.1", "sums", "", "", "4", [Answer("4", 1.0, messages=[("user", "2+2"), ("assistant", "4")])])
    written = evaluated([record(0, [1.0, 0.0]), talk, record(2, [], problem="dropped")], samples=2, ks=(1, 2))
    write_evaluation(path, written, written.records)
    assert read_evaluation(path) == written
    assert versions_in(path.parent) == [7]
    assert [each.name for each in path.parent.iterdir()] == ["7.jsonl"]


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    old = evaluated([record(0, [1.0])])
    write_evaluation(path, old, old.records)

    def failing() -> Iterator[Record]:
        yield record(0, [0.0])
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_evaluation(path, old, failing())
    assert read_evaluation(path) == old
    assert [each.name for each in tmp_path.iterdir()] == ["0.jsonl"]


@pytest.mark.parametrize("text", ["", "{}\n", '{"format": 99}\n', "no json\n", '{"format": 1, "run": "r"}\n', "5\n"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "0.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"0\.jsonl cannot be read as an evaluation"):
        read_evaluation(path)
    with pytest.raises(ConfigError, match=r"no evaluation .*1\.jsonl"):
        read_evaluation(tmp_path / "1.jsonl")


def test_figures_count_answers_by_prompt_and_leave_failed_rows_out() -> None:
    rows = [record(0, [1.0, 1.0, 0.0, 0.0]), record(1, [0.0] * 4), record(2, [], problem="quarantined")]
    figures = figures_of(evaluated(rows, samples=4, ks=(1, 2, 4)))["sums"]
    assert (figures.rows, figures.failed) == (2, 1)
    assert figures.reward is not None
    assert figures.accuracy is not None
    assert figures.reward.value == figures.accuracy.value == 0.25
    assert {k: figure.value for k, figure in figures.pass_at.items()} == pytest.approx({1: 0.25, 2: 5 / 12, 4: 0.5})
    assert {k: figure.value for k, figure in figures.majority_at.items()} == pytest.approx({1: 0.25, 2: 0.25, 4: 0.25})
    assert figures.accuracy.interval is not None
    assert figures.json()["pass_at"]["4"]["value"] == 0.5


@pytest.mark.parametrize("passes", [0.7, 0.9, 0.1])
def test_a_float32_reward_of_the_least_that_passes_passes(passes: float) -> None:
    figures = figures_of(evaluated([record(0, [float(np.float32(passes))])], passes=passes))["sums"]
    assert figures.accuracy is not None
    assert figures.accuracy.value == 1.0


def test_categories_have_figures_of_their_own() -> None:
    rows = [record(0, [1.0], category="easy"), record(1, [0.0], category="hard"), record(2, [1.0], category="easy")]
    categories = figures_of(evaluated(rows, category="level"))["sums"].categories
    assert {name: (each.rows, each.accuracy and each.accuracy.value) for name, each in categories.items()} == {
        "easy": (2, 1.0),
        "hard": (1, 0.0),
    }


def test_log_probs_have_a_mean_and_no_accuracy() -> None:
    figures = figures_of(evaluated([record(0, [-1.5]), record(1, [-0.5])], passes=None))["sums"]
    assert figures.reward is not None
    assert (figures.reward.value, figures.accuracy, figures.pass_at) == (-1.0, None, {})


def test_a_missing_answer_counts_as_failed() -> None:
    figures = figures_of(evaluated([record(0, [1.0])], samples=2, ks=(1, 2)))["sums"]
    assert figures.pass_at[1].value == 0.5
    assert figures.pass_at[2].value == 1.0


@pytest.mark.parametrize(
    ("text", "form", "vote"),
    [
        ("so 3 + 4 = 7.", "number", "7"),
        ("it is 7.0", "number", "7"),
        ("no idea", "number", ""),
        ("The answer is B", "letter", "B"),
        ("well <answer> a  b </answer>", "final", "a b"),
        ("plain text", "final", "plain text"),
    ],
)
def test_votes_are_read_as_rewards_read_answers(text: str, form: str, vote: str) -> None:
    assert vote_of(text, form) == vote
