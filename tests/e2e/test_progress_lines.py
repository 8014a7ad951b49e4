"""Output of `relax up` without a terminal: what the run waits for, and how it resumes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.faults import story_of
from tests.support.running import SUPPORT, Run, wait_until


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_start_and_resumption_are_told_in_plain_lines(make_run: Callable[..., Run], tmp_path: Path) -> None:
    settings = ["run.steps=100000", "trainer.checkpoint_every=1000", "reward.function=tiny_tasks.slow_share_of_sevens"]
    run = make_run("told", *settings).start()
    wait_until(lambda: run.table.get("relax.told.batch.2"), "batch.2", 120)
    run.end_in_order()
    command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(run.config), "run.name=told", *settings]
    output = tmp_path / "output"
    with output.open("w") as file:
        again = subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)
    try:
        announced = wait_until(
            lambda: re.search(r"^resuming from checkpoint 0, replaying (\d+) steps$", output.read_text(), re.MULTILINE),
            "announcement",
            120,
        )
        assert int(announced[1]) >= 3
        wait_until(lambda: re.search(r"^step \d+/100000 reward 0\.\d+ ", output.read_text(), re.MULTILINE), "step", 120)
    finally:
        again.send_signal(signal.SIGTERM)
        again.wait(60)
    lines = [line for line in output.read_text().splitlines() if line.startswith("step ")]
    waiting = [line for line in lines if "; waiting: " in line]
    assert waiting, lines
    assert all(re.search("resuming from|are ready|the actors start|the trainer", line) for line in waiting), waiting


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_server_that_loads_past_the_start_deadline_is_not_killed_nor_its_rollout(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    settings = ["rollout.backend=slow_server.SlowServed", "supervision.start_deadline=20", "run.steps=3"]
    run = make_run("loads", *settings)
    result = run.complete()
    assert (result["steps"], result["restarts"]) == (3, 0)
    story = story_of(run)
    assert story.of("crashed") == []
    ready = {f"{event['role']}.{event['n']}": event["seconds"] for event in story.of("ready")}
    assert ready["server.0"] > 20
    assert ready["rollout.0"] > 20
