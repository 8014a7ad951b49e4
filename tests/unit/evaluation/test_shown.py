"""Kept answers as `relax samples` and `relax compare` show them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relax_actors.cli.main import build
from relax_actors.config import load_config
from relax_actors.evaluation.records import Answer, Evaluated, Record, SetFacts, write_evaluation
from relax_actors.runtime.run_folder import RunFolder
from tests.support.running import SUPPORT


def records(rows: int) -> list[Record]:
    answered = [Record(f"eval.0.{i}", "sums", "", f"question {i}", "1", [Answer("1", 1.0)]) for i in range(rows)]
    return [*answered, Record(f"eval.0.{rows}", "sums", "", "the last", "1", [], problem="dropped, too long")]


def evaluation(folder: Path, rows: list[Record]) -> str:
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.save_config(load_config(SUPPORT / "tiny_eval.toml"), "")
    write_evaluation(run.evaluation(0), Evaluated("eval", 0, "", {"sums": SetFacts()}, rows), rows)
    return str(folder)


def shown(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build(list(arguments)), arguments)
    return result.exit_code, result.output


def test_the_last_rows_of_an_evaluation_are_shown_with_what_failed(tmp_path: Path) -> None:
    run = evaluation(tmp_path / "run", records(3))
    code, text = shown("samples", run, "--held-out", "0", "--last", "2")
    assert code == 0
    assert "question 2" in text
    assert "question 1" not in text
    assert "dropped, too long" in text
    lines = shown("samples", run, "--held-out", "0", "--json")[1].splitlines()
    assert [json.loads(line)["problem"] for line in lines] == ["", "", "", "dropped, too long"]


def test_an_evaluation_without_rows_has_nothing_to_show(tmp_path: Path) -> None:
    code, text = shown("samples", evaluation(tmp_path / "run", []), "--held-out", "0")
    assert code == 1
    assert "was evaluated on no row" in text


@pytest.mark.parametrize("folder", ["me@home/run", "me@home", "run"])
def test_a_folder_with_an_at_sign_is_compared(tmp_path: Path, folder: str) -> None:
    run = evaluation(tmp_path / folder, records(3))
    for given in (run, f"{run}@0"):
        code, text = shown("compare", given, run, "--json")
        assert code == 0, text
        assert json.loads(text.splitlines()[-1])["sets"]["sums"]["prompts"] == 3
