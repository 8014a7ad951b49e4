"""`relax check` calls rewards and environments once; what hangs or crashes does so in a process of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from relax_actors.checks import Findings, examine
from relax_actors.checks.calls import calls_of, check_call
from relax_actors.cli.main import build
from relax_actors.config import load_config
from relax_actors.isolation import bubblewrap
from relax_actors.messages import MediaSource, Prompt
from tests.support.messages import assert_says
from tests.support.running import TINY

OWN = "tried_calls"


def called(tmp_path: Path, *settings: str) -> Findings:
    return examine(load_config(TINY, [f"run.folder={tmp_path / 'run'}", *settings]), calls=TINY.parent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("raising", [], ["KeyError: 'level'", "tried_calls.py, line", "fix it or the row"]),
        ("not_finite", [], ["returned nan", "finite number"]),
        ("hanging", ["reward.deadline=4"], ["no result", "within 4 s", "reward.deadline"]),
        ("crashing", [], ["exit code 7", "no such device"]),
        ("forging", [], ["exit code 0"]),
        ("greedy", ["reward.memory_limit_mib=800"], ["MemoryError"]),
    ],
)
def test_a_reward_that_fails_is_refused(tmp_path: Path, name: str, more: list[str], words: list[str]) -> None:
    (error,) = called(tmp_path, f"reward.function={OWN}.{name}", *more).errors
    for word in [f'reward.function = "{OWN}.{name}"', "first row of data", "--no-calls", *words]:
        assert word in error
    assert not (tmp_path / "run").exists()


def test_the_reward_of_the_first_answer_is_noted(tmp_path: Path) -> None:
    found = called(tmp_path, f"reward.function={OWN}.length")
    assert found.errors == ()
    (note,) = [note for note in found.notes if note.startswith("reward.function")]
    assert_says(note, "answer", "first row of data")
    assert "gives 99 " not in note


def test_processes_that_a_reward_leaves_behind_are_not_waited_for(tmp_path: Path) -> None:
    found = called(tmp_path, f"reward.function={OWN}.leaving")
    assert found.errors == ()
    assert any('leaving" gives 1 for the answer' in note for note in found.notes)


def test_a_reward_may_divide_by_what_each_sample_of_a_run_has(tmp_path: Path) -> None:
    found = called(tmp_path, f"environment.name={OWN}.Echo", f"reward.function={OWN}.measuring")
    assert found.errors == ()


@pytest.mark.parametrize(
    "setting", [f"reward.function={OWN}.raising", f"environment.name={OWN}.Echo"], ids=["reward", "environment"]
)
def test_nothing_is_called_without_the_files_of_its_media(tmp_path: Path, setting: str) -> None:
    config = load_config(TINY, [setting])
    tokens = np.zeros(1, np.int32)
    media = [MediaSource("image", "eval/0/x.raw", xxh3_128="0" * 32, size=300, stored=True)]
    prompt = Prompt("<image>", tokens, "7", {}, seed=0, min_version=0, media=media)
    call = calls_of(config)[0]
    (note,) = check_call(config, call, tmp_path, {"data": prompt})
    assert setting.rpartition(".")[2] in note
    assert "is not called" in note


def test_a_built_in_reward_that_cannot_read_the_answer_is_refused(tmp_path: Path) -> None:
    (error,) = called(tmp_path, "reward.function=iou").errors
    assert_says(error, 'reward.function = "iou"', "first row of data")


@pytest.mark.skipif(bool(bubblewrap.problem()), reason=f"no sandbox here: {bubblewrap.problem()}")
def test_a_sandboxed_reward_is_called_in_its_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tmp_path / "hidden.txt"
    hidden.touch()
    monkeypatch.setenv("TRIED_FILE", str(hidden))
    monkeypatch.chdir(tmp_path)  # a sandbox does not show the working directory
    for isolation, value in (("none", 1), ("sandbox", 0)):
        found = called(tmp_path, f"reward.function={OWN}.reading", f"reward.isolation={isolation}")
        assert found.errors == ()
        assert any(f'reading" gives {value} for the answer' in note for note in found.notes)


@pytest.mark.parametrize(
    ("fails", "words"), [("reset", ["reset", "LookupError: no board"]), ("step", ["step", "LookupError: no move"])]
)
def test_an_environment_that_fails_is_refused(tmp_path: Path, fails: str, words: list[str]) -> None:
    (error,) = called(
        tmp_path, f"environment.name={OWN}.Echo", "reward.function=environment", f"environment.options.fails={fails}"
    ).errors
    for word in [f'environment.name = "{OWN}.Echo"', "tried_calls.py, line", *words]:
        assert word in error


def test_an_environment_answers_the_first_answer(tmp_path: Path) -> None:
    found = called(tmp_path, f"environment.name={OWN}.Echo", "reward.function=environment")
    assert found.errors == ()
    assert_says(" ".join(found.notes), f'environment.name = "{OWN}.Echo"', "gives 1", "first row of data")


def test_calls_can_be_left_out(tmp_path: Path) -> None:
    arguments = ["check", str(TINY), f"run.folder={tmp_path / 'run'}", f"reward.function={OWN}.raising"]
    assert CliRunner().invoke(build(["check"]), [*arguments, "--no-calls"]).exit_code == 0
    assert CliRunner().invoke(build(["check"]), arguments).exit_code == 2
