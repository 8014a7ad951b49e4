"""Daemons that role code starts end with the actor, the zygote, the node and the root, killed in turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.isolation.orphans import MANY_ZOMBIES
from tests.support import daemons
from tests.support.faults import hit, process
from tests.support.running import Run, processes_of, wait_until

MakeRun = Callable[..., Run]
SCANNED_SECONDS = 3.0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def age(pid: int) -> float:
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def started_by(folder: Path, run: Run, actor: str) -> list[int]:
    """Ids of the daemons that the present incarnation of an actor has started."""
    role = actor.partition(".")[0]

    def found() -> list[int]:
        path = folder / f"{role}.{run.pid_of(actor)}"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    pids: list[int] = wait_until(found, f"daemons of {actor}", 120)
    assert len(pids) == 4
    assert all(alive(pid) for pid in pids)
    return pids


def await_end(pids: list[int], what: str) -> None:
    wait_until(lambda: not any(map(alive, pids)), f"end of the daemons after the kill of {what}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_daemons_end_with_whatever_process_above_them_is_killed(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(daemons.FOLDER, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    settings = ("run.steps=3000", "reward.function=tests.support.daemons.score")
    run = make_run("daemons", *settings, "rollout.actor=tests.support.daemons.DaemonRollout").start()
    for target in ("reward.0", "rollout.0", "zygote", "node", "root"):
        of_reward, of_rollout = started_by(tmp_path, run, "reward.0"), started_by(tmp_path, run, "rollout.0")
        if target in ("node", "root"):
            wait_until(lambda pids=(*of_reward, *of_rollout): min(map(age, pids)) > SCANNED_SECONDS, "scan")
        if target == "root":
            assert run.process is not None
            run.process.kill()
            wait_until(lambda: not processes_of(run.folder.root), "end of the run's processes")
        else:
            hit(run, target)
        ended = {"reward.0": of_reward, "rollout.0": of_rollout, "zygote": of_rollout}
        await_end(ended.get(target, of_reward + of_rollout), target)
        if target == "reward.0":
            assert all(map(alive, of_rollout))
            assert process(run, "rollout.0")


def test_zombies_of_a_child_that_waits_later_are_kept_and_abandoned_ones_collected() -> None:
    """In a process of its own, which may become a subreaper."""
    script = f"""
import os, subprocess, sys, time
from relax_actors.isolation.orphans import ZombieReaper, become_subreaper
from relax_actors.isolation.proc import children
become_subreaper()
reaper = ZombieReaper()
late = subprocess.Popen([sys.executable, "-I", "-S", "-c", "raise SystemExit(7)"])
def zombies(n):
    while sum(child.state == "Z" for child in children().values()) < n:
        time.sleep(0.01)
zombies(1)
for _ in range(3):
    reaper.reap()
assert late.wait() == 7
for _ in range({MANY_ZOMBIES} + 1):
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.waitpid(child, 0)
zombies({MANY_ZOMBIES} + 1)
reaper.reap()
assert len(children()) == {MANY_ZOMBIES} + 1
reaper.reap()
assert children() == {{}}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
