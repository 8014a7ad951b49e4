"""Operators inspect the supervision tree, requeue quarantined rows, and scale roles."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.subjects import RowId
from relax_actors.messages import Prompt, Readmitted
from tests.support.running import Run, relax, wait_until

MakeRun = Callable[..., Run]


@pytest.mark.slow
def test_quarantined_rows_are_shown_and_requeued_after_the_cause_is_fixed(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = tmp_path / "fixed"
    monkeypatch.setenv("FIXED", str(fixed))
    settings = ("reward.function=tiny_tasks.poison_until_fixed", "supervision.max_failures=1", "run.steps=3000")
    run = make_run("requeue", *settings, "trainer.checkpoint_every=1000").start()
    column = run.table.subjects.column("quarantined")
    wait_until(lambda: run.table.get("relax.requeue.weights.0"), "weights.0", 90)
    wait_until(lambda: run.table.list_subjects(column), "a quarantined row", 90)
    listed = relax("quarantine", "list", "requeue", "--json", cwd=tmp_path).stdout.splitlines()
    first = json.loads(listed[0])
    assert (first["role"], first["error"], first["requeued"]) == ("reward", "RuntimeError: not fixed yet", False)
    old = RowId.parse(first["row"])
    shown = relax("quarantine", "show", "requeue", str(old), cwd=tmp_path).stdout
    assert "not fixed yet" in shown
    assert "trajectory:" in shown
    fixed.touch()
    done = relax("quarantine", "requeue", "requeue", str(old), cwd=tmp_path)
    assert "1 rows will be admitted again" in done.stdout, done.stderr
    cell = run.table.subject(old, "readmitted")
    wait_until(lambda: run.table.get(cell), "readmitted", 60)
    again = run.table.fetch(cell, Readmitted)
    assert again is not None
    task = run.table.fetch(run.table.subject(old, "prompt"), Prompt)
    prompt = run.table.fetch(run.table.subject(RowId.parse(again.row), "prompt"), Prompt)
    assert task is not None
    assert prompt is not None
    assert (prompt.requeue_of, prompt.text, prompt.metadata) == (str(old), task.text, task.metadata)
    assert prompt.seed != task.seed
    twice = relax("quarantine", "requeue", "requeue", str(old), cwd=tmp_path)
    assert "0 rows" in twice.stdout
    refused = relax("quarantine", "requeue", "requeue", "group.0.77", cwd=tmp_path)
    assert refused.returncode == 2
    assert "is not quarantined" in refused.stderr
    # An incarnation that is killed between the two writes leaves the prompt without `readmitted`: the next adds it.
    run.table.purge([cell])
    run.kill("prompts.0", signal.SIGKILL)
    wait_until(lambda: run.table.get(cell), "readmitted again", 60)
    assert run.table.fetch(cell, Readmitted) == again
    run.end_in_order()


@pytest.mark.slow
def test_tree_shows_state_incarnation_and_activity_of_each_actor(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("shown", "run.steps=2000", "rollout.max_tokens=40").start()
    wait_until(lambda: run.table.get("relax.shown.batch.0"), "batch.0", 90)
    pid = run.kill("reward.0")
    wait_until(lambda: run.pid_of("reward.0") not in (None, pid), "next incarnation of reward")

    def tree() -> str | None:
        text = relax("tree", "shown", cwd=tmp_path).stdout
        reward = next((line for line in text.splitlines() if "reward.0" in line), "")
        return text if "incarnation 2" in reward and "ready for" in reward else None

    lines = wait_until(tree, "the restart in the tree", 60).splitlines()
    reward = next(line for line in lines if "reward.0" in line)
    assert "1 restart," in reward
    assert f"pid {run.pid_of('reward.0')}" in reward
    assert all(" for " in line.partition("up ")[2] for line in lines if ".0 ready" in line)
    assert any("waiting for" in line for line in lines)
    seen = json.loads(relax("tree", "shown", "--json", cwd=tmp_path).stdout)
    (node,) = seen["nodes"]
    (own,) = [actor for actor in node["actors"] if actor["name"] == "reward.0"]
    assert (own["phase"], own["restarts"], own["incarnation"], own["pid"]) == ("ready", 1, 2, run.pid_of("reward.0"))
    assert (seen["live"], seen["broker"]["phase"], seen["missing"]) == (True, "ready", {})
    assert own["activity"]


@pytest.mark.slow
def test_role_is_scaled_up_and_down_while_the_run_is_up(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("scaled", "run.steps=3000", "reward.function=tiny_tasks.slow_share_of_sevens").start()
    wait_until(lambda: run.table.get("relax.scaled.batch.0"), "batch.0", 90)
    assert relax("scale", "scaled", "trainer=2", cwd=tmp_path).returncode == 2
    assert "is no role=number" in relax("scale", "scaled", "reward=0", cwd=tmp_path).stderr
    done = relax("scale", "scaled", "reward=3", "rollout=2", cwd=tmp_path)
    assert done.stdout == "reward: 3 actors\nrollout: 2 actors\n", done.stderr
    authors: set[str] = set()

    def all_have_written() -> bool:
        for name in ("reward", "trajectory"):
            found = run.table.snapshot([run.table.subjects.column(name)])
            authors.update(run.table.read_envelope(cell.data).author.partition("#")[0] for _, cell in found)
        return {"reward.0", "reward.1", "reward.2", "rollout.0", "rollout.1"} <= authors

    wait_until(all_have_written, "cells of all actors", 60)
    done = relax("scale", "scaled", "reward=1", "rollout=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert run.pid_of("reward.1") is None
    assert not run.table.list_subjects("relax.scaled.group.*.*.dropped")
    run.end_in_order()
