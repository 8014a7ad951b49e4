"""Outcome of a child's process: status pipe, exit codes and blame."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relax_actors.supervision.outcome import STATUS_FD, ReportedStatus, outcome_of
from relax_actors.supervision.spec import Blame, Exit, Failure
from tests.support.process_trees import (
    HEAD,
    PATIENCE,
    READY,
    RunTree,
    python,
)


@pytest.mark.parametrize(
    ("code", "out_of_memory", "blame", "counted", "final"),
    [
        (-signal.SIGKILL, False, Blame.EXTERNAL, True, False),
        (-signal.SIGKILL, True, Blame.ROWS, True, False),
        (-signal.SIGSEGV, False, Blame.ROWS, True, False),
        (-signal.SIGABRT, False, Blame.ROWS, True, False),
        (70, False, Blame.ROWS, True, False),
        (72, False, Blame.NONE, True, False),
        (73, False, Blame.NONE, False, False),
        (74, False, Blame.NONE, False, False),
        (2, False, Blame.ROWS, True, True),
    ],
)
def test_exit_code_decides_about_blame_and_restart(
    code: int, *, out_of_memory: bool, blame: Blame, counted: bool, final: bool
) -> None:
    outcome = outcome_of(code, None, ReportedStatus(), out_of_memory=out_of_memory)
    assert (outcome.blame, outcome.counted, outcome.final) == (blame, counted, final)


def test_process_tree_reads_what_a_child_reports(run: RunTree, tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from relax_actors.supervision.outcome import StatusPipe\n"
        "import os, subprocess\n"
        "status = StatusPipe()\n"
        f"assert '{STATUS_FD}' not in os.environ\n"
        "status.ready(); status.failed('first'); status.failed('x' * 50000 + 'KeyError: last words'); sys.exit(70)\n"
    )
    running = run({"a": script}, intensity=0)
    report = running.end()
    assert running.until("ready", "a").child == "a"
    assert report is not None
    assert report.reason.endswith("KeyError: last words")


def test_status_pipe_is_silent_without_a_supervisor() -> None:
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from relax_actors.supervision.outcome import StatusPipe\n"
        "StatusPipe().ready(); StatusPipe().failed('x')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != STATUS_FD}
    done = subprocess.run(python(script), env=environment, capture_output=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_failure_below_a_child_is_part_of_its_outcome(run: RunTree) -> None:
    script = READY + "say(failed='rollout.3: no')\nsay(child_failure=['rollout.3', 'no', 'Traceback'])\nsys.exit(75)\n"
    running = run({"a": script})
    assert running.end() is not None
    outcome = running.until("ended", "a").outcome
    assert outcome is not None
    assert outcome.child_failure == Failure("rollout.3", "no", "Traceback")


def test_child_stopped_by_somebody_else_counts_as_an_external_kill(run: RunTree) -> None:
    handler = "signal.signal(15, lambda *_: (say(stop_requested=True), sys.exit(0)))\n"
    obeys = HEAD + handler + "say(ready=True)\nwhile True: signal.pause()\n"
    running = run({"a": obeys}, intensity=0)
    running.until("ready", "a")
    running.tree.kill("a", signal.SIGTERM)
    assert running.until("ended", "a").outcome == Exit(normal=True, reason="ended", blame=Blame.EXTERNAL)
    running.until("ready", "a")
