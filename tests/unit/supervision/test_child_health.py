"""Health of real child processes: signs of life, health checks, start deadlines, and pauses of the machine."""

from __future__ import annotations

import os
import queue
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_actors.runtime.blackbox import BlackBox
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.outcome import Verdict
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.spec import Backoff, Blame, ChildSpec, Exit, Limits
from relax_actors.supervision.supervisor import GiveUp, Supervisor
from tests.support.process_trees import (
    HEAD,
    PATIENCE,
    READY,
    WAITS,
    Recorder,
    RunTree,
    TreeThread,
    python,
)
from tests.support.running import wait_until


def test_black_box_holds_the_rows_of_a_dead_child(run: RunTree, tmp_path: Path) -> None:
    running = run({"a": WAITS}, boxes=("a",))
    running.until("ready", "a")
    BlackBox(tmp_path / "a.box").record(["group.1.2"], "the model")
    running.tree.kill("a", signal.SIGKILL)
    last = running.until("ended", "a").last
    assert last is not None
    assert (last.rows, last.waiting_for) == (("group.1.2",), "the model")
    running.until("ready", "a")
    assert BlackBox(tmp_path / "a.box").read().rows == ()


def test_sign_of_life_never_goes_back_for_a_reader(tmp_path: Path) -> None:
    """Else the supervisor sees a healthy process without a sign of life, and kills it."""
    box = BlackBox(tmp_path / "a.box")
    box.reset()
    began = last = box.read().beat
    beats = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\n"
        "from relax_actors.runtime.blackbox import BlackBox\n"
        f"box = BlackBox(Path({str(tmp_path / 'a.box')!r}))\n"
        "while True:\n    box.record(['group.1.2'])\n    for _ in range(50):\n        box.beat()\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", beats])
    try:
        wait_until(lambda: box.read().beat > began, "a sign of life", PATIENCE)
        for _ in range(20_000):
            seen = box.read()
            assert seen.beat >= last
            assert seen.rows in {("group.1.2",), ()}
            last = seen.beat
        assert last > began
    finally:
        writer.kill()
        writer.wait()
    box.close()


def test_child_without_sign_of_life_is_killed_and_restarted(run: RunTree) -> None:
    running = run({"a": WAITS, "boxless": WAITS}, boxes=("a",), heartbeat=0.3)
    running.until("ready", "a")
    outcome = running.until("ended").outcome
    assert outcome is not None
    assert re.fullmatch(r"no progress for 0\.\d s: no sign of life \(supervision\.heartbeat\)", outcome.reason)
    running.until("started", "a", starts=2)
    assert {seen.child for seen in running.recorder.all if seen.what == "ended"} == {"a"}


def test_child_stopped_by_a_signal_is_killed_and_restarted(run: RunTree) -> None:
    running = run({"a": WAITS}, boxes=("a",), heartbeat=0.5)
    running.until("ready", "a")
    assert running.tree.kill("a", signal.SIGSTOP)
    outcome = running.until("ended", "a").outcome
    assert outcome is not None
    assert "it was stopped by a signal" in outcome.reason
    assert outcome.blame is Blame.EXTERNAL
    running.until("started", "a", starts=2)


def test_child_that_fails_its_health_check_is_killed_and_restarted(tmp_path: Path) -> None:
    verdicts = iter([None, Verdict("ill", blame=Blame.NONE), None, Verdict("worse", final=True)])
    launch = Launch(python(WAITS), tmp_path / "log", health_check=lambda _pid: next(verdicts, None))
    made = Supervisor([ChildSpec("a")], Limits(5, 60), Backoff(0.01, 0.01), random.Random(1))
    recorder = Recorder()
    running = TreeThread(ProcessTree({"p": made}, lambda _: launch, recorder, 60.0), recorder)
    assert running.until("ended", "a").outcome == Exit(normal=False, reason="ill", blame=Blame.NONE)
    assert running.until("started", "a").starts == 2
    assert running.end() == GiveUp("a", "worse")


def test_child_with_signs_of_life_is_not_killed(run: RunTree, tmp_path: Path) -> None:
    beats = READY + (
        "import mmap, time\n"
        f"m = mmap.mmap(os.open({str(tmp_path / 'a.box')!r}, os.O_RDWR), 16384)\n"
        "end = time.monotonic() + 2.0\n"
        "while time.monotonic() < end:\n    memoryview(m)[:8].cast('d')[0] = time.monotonic()\n"
        "    signal.sigtimedwait([], 0.02)\n"
    )
    running = run({"a": beats}, boxes=("a",), heartbeat=1.0)
    assert running.until("ended", "a").outcome == Exit(normal=True, reason="ended")


def test_child_that_exceeds_its_start_deadline_is_killed_and_restarted(run: RunTree) -> None:
    running = run({"a": HEAD + "signal.pause()\n"}, start_deadline=0.3, boxes=("a",), heartbeat=0.05)
    outcome = running.until("ended", "a").outcome
    assert outcome is not None
    assert re.search(r"not ready within .* s, and no progress for .*raise supervision\.start_deadline", outcome.reason)
    running.until("started", "a", starts=2)


def test_child_with_a_probe_is_ready_once_the_probe_succeeds(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    script = f"import signal; open({str(flag)!r}, 'w').close(); signal.pause()"
    made = Supervisor(
        [ChildSpec("a")],
        Limits(1, 60),
        Backoff(0.01, 0.01),
        random.Random(1),
    )
    recorder = Recorder()
    launch = Launch(python(script), tmp_path / "log", probe=flag.exists)
    running = TreeThread(ProcessTree({"p": made}, lambda _: launch, recorder, 60.0), recorder)
    running.until("ready", "a")
    assert running.stop() is None


@pytest.mark.slow
def test_pause_of_the_whole_machine_kills_no_child(tmp_path: Path) -> None:
    """Supervisor and child are paused for longer than the heartbeat, and the child resumes last."""
    beats = READY + (
        "import mmap, time\n"
        f"m = mmap.mmap(os.open({str(tmp_path / 'a.box')!r}, os.O_RDWR), 16384)\n"
        "while True:\n    memoryview(m)[:8].cast('d')[0] = time.monotonic()\n    signal.sigtimedwait([], 0.05)\n"
    )
    parent = (
        f"import sys, threading, random; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\n"
        "from tests.support.process_trees import *\n"
        "class Says(Recorder):\n"
        "    def _put(self, seen):\n        print(seen.what, seen.pid, flush=True)\n"
        "s = Supervisor([ChildSpec('a')], Limits(5, 60), Backoff(0.01, 0.05), random.Random(1))\n"
        f"launch = Launch({python(beats)!r}, Path({str(tmp_path / 'log')!r}), Path({str(tmp_path / 'a.box')!r}))\n"
        "ProcessTree({'p': s}, lambda _: launch, Says(), 2.0).run()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        child = int(process.stdout.readline().split()[1])
        assert process.stdout.readline().startswith("ready")
        for pid in (process.pid, child):
            os.kill(pid, signal.SIGSTOP)
        # The test is about the time that passes.
        assert select.select([process.stdout], [], [], 3.0)[0] == []
        os.kill(process.pid, signal.SIGCONT)
        assert select.select([process.stdout], [], [], 0.6)[0] == []
        os.kill(child, signal.SIGCONT)
        assert select.select([process.stdout], [], [], 2.5)[0] == []
        # A child that is stopped alone is still found.
        os.kill(child, signal.SIGSTOP)
        assert process.stdout.readline().startswith("ended")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def beating(tmp_path: Path) -> Iterator[Callable[[float, Callable[[int], None]], TreeThread]]:
    """Runs a child that beats every 50 ms, under a tree whose periodic work gets its pid once it is ready."""
    made: list[TreeThread] = []
    box = tmp_path / "a.box"
    beats = READY + (
        "import mmap, time\n"
        f"m = mmap.mmap(os.open({str(box)!r}, os.O_RDWR), 16384)\n"
        "while True:\n    memoryview(m)[:8].cast('d')[0] = time.monotonic()\n    signal.sigtimedwait([], 0.05)\n"
    )

    def start(heartbeat: float, periodic: Callable[[int], None]) -> TreeThread:
        child = ChildSpec("a")
        supervisor = Supervisor([child], Limits(5, 60), Backoff(0.01, 0.05), random.Random(1))
        recorder, pids = Recorder(), list[int]()
        launch = Launch(python(beats), tmp_path / "log", box)
        tree = ProcessTree({"p": supervisor}, lambda _: launch, recorder, heartbeat, lambda: [*map(periodic, pids)])
        made.append(running := TreeThread(tree, recorder))
        started = running.until("started").pid
        running.until("ready")
        pids.append(started)
        return running

    yield start
    for running in made:
        assert running.stop() is None


@pytest.mark.slow
def test_pause_between_two_waits_kills_no_child(beating: Callable[..., TreeThread]) -> None:
    """Everything is paused during the tree's periodic work, and the child resumes last."""
    paused = threading.Event()

    def periodic(child: int) -> None:
        if not paused.is_set():
            os.kill(child, signal.SIGSTOP)
            time.sleep(3.0)  # the pause
            threading.Timer(0.5, os.kill, (child, signal.SIGCONT)).start()
            paused.set()

    running = beating(1.5, periodic)
    assert paused.wait(PATIENCE)
    with pytest.raises(queue.Empty):
        running.recorder.queue.get(timeout=3.0)


@pytest.mark.slow
def test_hung_child_is_found_although_the_tree_is_slow_in_every_round(beating: Callable[..., TreeThread]) -> None:
    stopped: list[int] = []

    def periodic(child: int) -> None:
        if not stopped:
            os.kill(child, signal.SIGSTOP)
            stopped.append(child)
        time.sleep(1.1)  # the delay

    outcome = beating(1.5, periodic).until("ended").outcome
    assert outcome is not None
    assert "stopped by a signal" in str(outcome)
