"""What a user sees when a role fails, and how the run goes on after the cause is fixed."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import story_of
from tests.support.messages import assert_says
from tests.support.running import TINY, Run, processes_of, relax, wait_until

MakeRun = Callable[..., Run]
SCORE = "def score(completion, prompt):\n    {}\n"


def own_config(tmp_path: Path, body: str, more: str = "") -> Path:
    """A configuration in a folder of its own, whose reward function has this body; `more` are further sections."""
    config = tmp_path / "tiny.toml"
    config.write_text(TINY.read_text().replace("tiny_tasks.share_of_sevens", "scoring.score") + more)
    (tmp_path / "tiny_tasks.py").write_text((TINY.parent / "tiny_tasks.py").read_text())
    (tmp_path / "scoring.py").write_text(SCORE.format(body))
    return config


@pytest.mark.slow
def test_node_that_is_not_ready_in_time_ends_the_run(make_run: MakeRun) -> None:
    run = make_run("late", "supervision.start_deadline=0.01", "supervision.intensity=0")
    code, _, said = run.start().finish()
    assert code == 1, said
    # The broker may be late, too.
    expected = (
        r"supervision gave up: (node|broker)\n1 failure, and the limit is 0 in 60 s \(supervision\.intensity, "
        r"supervision\.period\)\. Last failure: not ready within .* s, .* raise supervision\.start_deadline"
    )
    assert re.search(expected, said), said


HELD_OUT = """
[eval]
rows = 32
every = 4
reward = "exact_match"

[eval.data]
kind = "python"
function = "tiny_tasks.make"
size = 32
"""
"""Held-out rows, which a function of their own scores."""


@pytest.mark.slow
def test_reward_that_always_raises_stops_the_run_which_resumes_after_the_fix(make_run: MakeRun, tmp_path: Path) -> None:
    config = own_config(tmp_path, "raise ValueError('no score for ' + completion)", HELD_OUT)
    failed = relax("up", str(config), "run.name=raises", cwd=tmp_path)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    headline = (
        r"the first \d+ rows of role reward all failed with the same error, so the run was stopped: ValueError: "
        r"no score for .*, in score \(scoring\.py:2\)\. Fix the cause and run the same `relax up` again: new rows take "
        r"the place of the quarantined ones; `relax quarantine requeue raises --all` admits their tasks again\n"
    )
    assert re.search(headline, failed.stdout), failed.stdout
    assert re.search(r"^reward: \d+ rows? quarantined, \d+ failures? tried again: Val", failed.stdout, re.MULTILINE)
    assert "supervision gave up: reward.0" in failed.stdout
    assert "ValueError: no score for" in failed.stdout
    assert failed.stderr == ""
    assert processes_of(tmp_path / "runs" / "raises") == []
    assert 1 <= len(quarantined(tmp_path, "raises")) <= 16

    (tmp_path / "scoring.py").write_text(SCORE.format("return undefined"))
    again = relax("up", str(config), "run.name=raises", "supervision.max_failures=1", "--quiet", cwd=tmp_path)
    assert again.returncode == 1
    assert_says(again.stdout, "NameError", "undefined", "scoring.py:2")
    assert "no score for" not in again.stdout

    before = quarantined(tmp_path, "raises")
    told = relax("quarantine", "requeue", "raises", "--all", cwd=tmp_path)
    assert told.stdout == f"{len(before)} rows will be admitted again\n", told.stderr
    (tmp_path / "scoring.py").write_text(SCORE.format("return completion.count('7') / 6"))
    result = make_run("raises", config=config).complete()
    assert (result["trained"], result["in_flight"], result["quarantined"]) == (32, 0, len(before))
    assert result["admitted"] == result["trained"] + result["dropped"] + result["quarantined"]
    assert "the ledger is complete" in relax("ledger", "raises", cwd=tmp_path).stdout
    assert len({row["readmitted"] for row in quarantined(tmp_path, "raises")} - {None}) == min(32, len(before))


@pytest.mark.slow
def test_run_that_used_up_its_refills_goes_on_after_the_fix(make_run: MakeRun, tmp_path: Path) -> None:
    settings = ("supervision.max_failures=1", "prompts.max_refills=2")
    config = own_config(tmp_path, "raise (ValueError, TypeError)[prompt.seed % 2](completion)", HELD_OUT)
    failed = relax("up", str(config), "run.name=refills", *settings, cwd=tmp_path)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert re.search(r"a slot of step \d was refilled 2 times, .* raise prompts\.max_refills", failed.stdout)
    (tmp_path / "scoring.py").write_text(SCORE.format("return completion.count('7') / 6"))
    result = make_run("refills", *settings, config=config).complete()
    assert (result["trained"], result["in_flight"]) == (32, 0)
    assert "the ledger is complete" in relax("ledger", "refills", cwd=tmp_path).stdout


def quarantined(folder: Path, run: str) -> list[dict[str, Any]]:
    """The quarantined rows of a run, as `relax quarantine list` prints them."""
    listed = relax("quarantine", "list", run, "--json", cwd=folder)
    assert listed.returncode == 0, listed.stderr
    return [json.loads(line) for line in listed.stdout.splitlines()]


@pytest.mark.slow
def test_wrong_number_of_rewards_names_the_role_that_returned_them(tmp_path: Path) -> None:
    config = own_config(tmp_path, "return 1.0")
    (tmp_path / "shaping.py").write_text(
        "from relax_actors import Role\n\n\nclass Shaping(Role):\n    reads = ('reward',)\n    writes = 'shaped'\n\n"
        "    def handle(self, row):\n        return list(row.reward)[1:]\n"
    )
    settings = ("roles.shaping.actor=shaping.Shaping", "advantages.reads=shaped")
    failed = relax("up", str(config), "run.name=short", *settings, "--json", cwd=tmp_path)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert_says(
        failed.stderr,
        "rows of role shaping",
        "same error",
        "RowError",
        "returned 3 numbers",
        "column shaped",
        "expected 4",
    )
    assert "supervision gave up: shaping.0" in failed.stderr
    assert re.search(r"^shaping: \d+ rows? quarantined: RowError: role shaping", failed.stderr, re.MULTILINE)


@pytest.mark.slow
def test_hang_is_reported_as_no_progress_with_row_and_place(make_run: MakeRun) -> None:
    run = make_run("hangs", "reward.function=tiny_tasks.always_hang", "reward.deadline=1", "supervision.intensity=1")
    code, _, said = run.start().finish(90)
    assert code == 1
    what = (
        r"no progress for \d\.\d s while handling group\.\d\.\d[^,]*(, group\.\d\.\d)*( and \d+ more rows)?, in "
        r"always_hang \(tiny_tasks\.py:\d+\); its deadline is 1 s\. Raise `deadline` if such a row may take longer"
    )
    assert re.search(rf"Last failure: {what}\n", said), said
    assert "exit code" not in said
    assert "in always_hang\n" in said
    crashed = story_of(run).of("crashed")
    assert crashed
    assert all(re.fullmatch(what, event["reason"]) for event in crashed), crashed


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reward.0"])
def test_monitor_and_tree_show_the_same_restarts(make_run: MakeRun, tmp_path: Path, target: str) -> None:
    run = make_run("counted", "run.steps=100000").start()
    wait_until(lambda: run.table.get("relax.counted.batch.1"), "batch.1", 90)
    for _ in range(2):
        old = run.kill(target, signal.SIGKILL)
        wait_until(partial(is_replaced, run, target, old), f"another {target}")
    wait_until(lambda: "2 restarts" in line_of(relax("tree", "counted", cwd=tmp_path).stdout, target), "tree", 60)
    shown = relax("monitor", "counted", "--count", "60", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert " restarts 2 " in shown.stdout.splitlines()[-1]


def is_replaced(run: Run, actor: str, old: int) -> bool:
    return run.pid_of(actor) not in (None, old)


def line_of(text: str, word: str) -> str:
    return next((line for line in text.splitlines() if word in line), "")


@pytest.mark.slow
def test_role_that_no_node_has_is_named_and_ends_the_run_after_a_while(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("alone")
    run.start("--roles", "prompts,trainer")
    waits_for = "rows of step 0: 0 of 4 are ready"
    absent = "reward has no actor on any node: nobody writes column reward, needed by advantages"

    def is_shown() -> bool:
        shown = relax("tree", "alone", cwd=tmp_path).stdout
        return absent in shown and f"waiting for {waits_for} for " in line_of(shown, "trainer.0")

    wait_until(is_shown, f"`relax tree` with an absent role and a trainer that waits for {waits_for}", 120)
    run.stop()
    code, _, said = run.start("--roles", "prompts,trainer", "supervision.patience=2").finish(120)
    assert code == 1
    assert re.search(
        r"supervision gave up: reward\n"
        r"role reward has had no actor on any node for \d+ s: nobody writes column reward, needed by advantages. "
        r"Start one with `relax node --role reward=1`, or include reward in `relax up --roles`. After 2 s "
        r"\(supervision\.patience\) the run was ended\n"
        r"fix the cause; then `.* up .* supervision\.patience=2 --roles prompts,trainer ",
        said,
    ), said
