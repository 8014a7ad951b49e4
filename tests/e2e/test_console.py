"""The console of `relax up`: starts when its link is opened, and may be killed without any effect on the run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_actors.console.link import load_link
from relax_actors.runtime.run_folder import RunFolder
from tests.support.consoles import log_of
from tests.support.running import ON_POLICY, TINY, processes_of, relax, wait_until

pytestmark = pytest.mark.slow
GATED = ("reward.function=tiny_tasks.gated_share_of_sevens", "reward.deadline=600")


def consoles(folder: Path) -> list[int]:
    """Processes of the console of a run."""
    return processes_of(folder, "--listen-fd")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that makes no step before the file `gate` exists."""
    command = [sys.executable, "-m", "relax_actors.cli.main", "up", str(TINY), "run.name=seen", *GATED, *ON_POLICY]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"GATE": str(tmp_path / "gate")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.terminate()
    process.communicate(timeout=60)


def test_console_of_a_run_is_killed_and_comes_back(up: subprocess.Popen[str], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "seen")
    assert up.stdout is not None
    match = next(filter(None, (re.search(r"console: (http://\S+)/#token=(\S+)", line) for line in up.stdout)))
    url, token = match[1], match[2]
    assert consoles(folder.root) == []
    seen = []
    for _ in range(2):
        with log_of(url, token, seen[-1] if seen else 0) as messages:
            seen += [next(messages)[0] for _ in range(20)]
        (pid,) = consoles(folder.root)
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, up.pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda dead=pid: dead not in consoles(folder.root), "end of the console")
    assert seen == list(range(1, 41))
    again = relax("console", "seen", "--no-open", cwd=tmp_path)
    assert again.stdout == f"console of run seen: {url}/#token={token}\n", "the console that is up is shown"
    (pid,) = consoles(folder.root)
    os.kill(pid, signal.SIGSTOP)  # so that it does not end in order
    (tmp_path / "gate").touch()
    wait_until(folder.summary.exists, "the result", 120)
    assert consoles(folder.root) == [pid], "the result is written before the console ends"
    said = up.stdout.read()
    assert up.wait(120) == 0, said
    assert consoles(folder.root) == []
    ledger = relax("ledger", "seen", "--json", cwd=tmp_path)
    assert ledger.returncode == 0, ledger.stdout
    assert '"violations": []' in ledger.stdout


def test_run_without_a_console_listens_nowhere(tmp_path: Path) -> None:
    done = relax("up", str(TINY), "run.name=alone", "run.steps=2", "--no-console", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "#token=" not in done.stdout
    assert load_link(tmp_path / "runs" / "alone") is None


def test_name_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    done = relax("console", "nothing", "--no-open", cwd=tmp_path)
    assert done.returncode == 2
    assert "no run 'nothing'" in done.stderr
    done = relax("console", "--no-open", cwd=tmp_path)
    assert done.returncode == 2
    assert "runs/ holds no run" in done.stderr
