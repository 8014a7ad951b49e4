"""Process tree with real processes: start, restart, shutdown and resizing; none is left behind."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.logs import LOG_BYTES
from relax_actors.supervision.launch import Launch, StartError
from relax_actors.supervision.outcome import STATUS_FD
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
    running,
    tree_of,
)
from tests.support.running import wait_until


def test_child_becomes_ready_and_stops_on_request(run: RunTree) -> None:
    running = run({"a": HEAD + "signal.signal(15, lambda *_: sys.exit(0))\nsay(ready=True)\nsignal.pause()\n"})
    assert running.until("started", "a").starts == 1
    running.until("ready", "a")
    assert running.stop() is None
    ended = running.until("ended", "a")
    assert ended.outcome == Exit(normal=True, reason="stopped")


def test_crashed_child_is_restarted_and_its_error_is_kept(run: RunTree, tmp_path: Path) -> None:
    script = READY + (
        f"first = not os.path.exists({str(tmp_path / 'seen')!r})\n"
        f"open({str(tmp_path / 'seen')!r}, 'w').close()\n"
        "if first:\n    say(failed='Traceback\\nValueError: boom')\n    sys.exit(70)\n"
        "signal.pause()\n"
    )
    running = run({"a": script})
    ended = running.until("ended", "a").outcome
    assert ended == Exit(normal=False, reason="exit code 70: ValueError: boom", detail="Traceback\nValueError: boom")
    assert running.until("started", "a").starts == 2
    running.until("ready", "a")


def test_killed_child_is_restarted_and_the_others_keep_running(run: RunTree) -> None:
    running = run({"a": WAITS, "b": WAITS})
    first = {running.until("ready").child, running.until("ready").child}
    assert first == {"a", "b"}
    assert running.tree.kill("a", signal.SIGKILL)
    outcome = running.until("ended", "a").outcome
    assert outcome == Exit(normal=False, reason="killed by SIGKILL", blame=Blame.EXTERNAL)
    running.until("ready", "a")
    assert [seen.child for seen in running.recorder.all if seen.what == "started"] == ["a", "b", "a"]
    assert not running.tree.kill("unknown", signal.SIGKILL)


def test_states_of_children_are_available(run: RunTree) -> None:
    running = run({"a": WAITS})
    running.until("ready", "a")
    running.tree.kill("a", signal.SIGKILL)
    running.until("ready", "a")
    state = running.tree.states()["a"]
    assert (state["phase"], state["restarts"]) == ("ready", 1)
    assert time.time() - state["since"] < PATIENCE


def test_states_say_which_children_work_now(run: RunTree, tmp_path: Path) -> None:
    running = run({"a": WAITS, "b": WAITS}, boxes=("a", "b"))
    for _ in range(2):
        running.until("ready")
    box = BlackBox(tmp_path / "a.box")
    for rows, waits_for, works in ((["group.1.2"], "", True), ([], "a row with prompt", False), ([], "", True)):
        box.record(rows, waits_for)
        # The loop of the tree may take long for an iteration, so this does not wait for one.
        assert [state["works"] for state in running.tree.states().values()] == [works, False], rows
    box.close()


def test_a_child_that_stops_works_until_it_has_ended(run: RunTree) -> None:
    ignores = HEAD + "signal.signal(15, signal.SIG_IGN)\nsay(ready=True)\nwhile True:\n    signal.pause()\n"
    running = run({"a": ignores}, boxes=("a",))
    running.until("ready", "a")
    assert not running.tree.states()["a"]["works"]
    running.tree.stop()
    wait_until(lambda: running.tree.states()["a"]["phase"] == "stopping", "phase stopping")
    assert running.tree.states()["a"]["works"]
    assert running.tree.kill("a", signal.SIGKILL)
    wait_until(lambda: not running.tree.states()["a"]["works"], "end of the child")


def test_configuration_error_ends_all_children_at_once(run: RunTree) -> None:
    running = run({"a": WAITS, "b": HEAD + "say(failed='no such key')\nsys.exit(2)\n"}, intensity=100)
    report = running.end()
    assert report == GiveUp("b", "exit code 2: no such key")
    assert [seen.starts for seen in running.recorder.all if seen.what == "started"] == [1, 1]


def test_child_that_keeps_failing_stops_all_pools_and_its_error_is_in_the_report(run: RunTree) -> None:
    bad = HEAD + "say(failed='RuntimeError: no luck')\nsys.exit(70)\n"
    running = run({"good": WAITS, "bad": bad}, intensity=2, pools=[("good",), ("bad",)])
    report = running.end()
    assert report is not None
    assert report.child == "bad"
    assert report.reason.startswith("3 failures in ")
    assert report.reason.endswith("exit code 70: RuntimeError: no luck")
    gave_up = running.until("gave_up")
    assert (gave_up.child, gave_up.report) == ("bad", report)
    assert sum(seen.what == "started" and seen.child == "bad" for seen in running.recorder.all) == 3
    assert sum(seen.what == "gave_up" for seen in running.recorder.all) == 1


def test_children_stop_one_by_one_in_reverse_order_of_pools_and_children(run: RunTree) -> None:
    running = run(dict.fromkeys("abcd", WAITS), pools=[("a", "b"), ("c", "d")])
    for _ in range(4):
        running.until("ready")
    assert running.stop() is None
    assert [seen.child for seen in running.recorder.all if seen.what == "ended"] == ["d", "c", "b", "a"]


def test_child_that_ignores_sigterm_is_killed_after_its_shutdown_seconds(run: RunTree) -> None:
    stubborn = HEAD + "signal.signal(15, signal.SIG_IGN)\nsay(ready=True)\nwhile True: signal.pause()\n"
    running = run({"a": stubborn}, shutdown=0.2)
    running.until("ready", "a")
    began = time.monotonic()
    assert running.stop() is None
    assert 0.2 <= time.monotonic() - began < PATIENCE / 2


def test_process_stopped_by_a_signal_can_be_shut_down(run: RunTree) -> None:
    running = run({"a": WAITS}, shutdown=PATIENCE)
    running.until("ready", "a")
    running.tree.kill("a", signal.SIGSTOP)
    began = time.monotonic()
    assert running.stop() is None
    assert time.monotonic() - began < PATIENCE / 2


def test_process_group_of_a_child_ends_with_the_child(run: RunTree) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    script = READY + (
        "if os.fork() == 0:\n    signal.signal(15, signal.SIG_IGN)\n    while True: signal.pause()\nsignal.pause()\n"
    )
    running = run(
        {"a": script.replace("if os.fork", f"w = os.open('/proc/{os.getpid()}/fd/{write}', os.O_WRONLY)\nif os.fork")}
    )
    running.until("ready", "a")
    assert running.stop() is None
    os.close(write)
    assert select.select([read], [], [], PATIENCE)[0]
    assert os.read(read, 1) == b""
    os.close(read)


def test_child_gets_its_environment_and_writes_to_its_log(run: RunTree, tmp_path: Path) -> None:
    script = (
        HEAD + "print(os.environ['CHILD'], flush=True)\nprint('oh', file=sys.stderr, flush=True)\nsay(ready=True)\n"
    )
    run({"a": script}).until("ended", "a")
    assert (tmp_path / "logs" / "a").read_text().split()[:2] == ["a", "oh"]


def test_missing_program_is_a_failed_start(tmp_path: Path) -> None:
    made = Supervisor(
        [ChildSpec("a")],
        Limits(1, 60),
        Backoff(0.01, 0.01),
        random.Random(1),
    )
    tree = ProcessTree({"p": made}, lambda _: Launch(["/no/such/program"], tmp_path / "log"), Recorder(), 60.0)
    report = TreeThread(tree, Recorder()).end()
    assert report is not None
    assert report.reason.startswith("2 failures in ")
    assert "/no/such/program" in (tmp_path / "log").read_text() or "No such file" in (tmp_path / "log").read_text()


def test_child_dies_when_its_parent_is_killed() -> None:
    read, write = os.pipe()
    child = f"import os, signal; os.write({write}, b'%d\\n' % os.getpid()); signal.pause()"
    parent = (
        f"import sys, signal; sys.path[:0] = {sys.path!r}\n"
        "from broker.process import spawn\n"
        f"spawn({python(child)!r}, pass_fds=({write},))\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen(python(parent), pass_fds=(write,))
    os.close(write)
    assert select.select([read], [], [], PATIENCE)[0]
    pidfd = os.pidfd_open(int(os.read(read, 64)))
    assert select.select([pidfd], [], [], 0)[0] == []
    process.kill()
    process.wait(PATIENCE)
    assert select.select([pidfd], [], [], PATIENCE)[0]
    assert os.read(read, 1) == b""
    os.close(pidfd)
    os.close(read)


def test_a_stop_during_the_start_waits_for_a_child_that_has_work_to_finish(tmp_path: Path) -> None:
    done = tmp_path / "done"
    script = HEAD + (
        "while signal.SIGTERM not in signal.sigpending(): pass\n"
        f"signal.signal(signal.SIGTERM, lambda *_: open({str(done)!r}, 'w').close())\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})\n"
    )
    made = running(tree_of(("a",), lambda _: Launch(python(script), tmp_path / "log", hold_stop=True)))
    made.until("started", "a")
    made.stop()
    assert done.exists()


def test_children_not_yet_started_stay_down_after_giving_up(tmp_path: Path) -> None:
    def launch(child: str) -> Launch:
        def fork(_log: int, _status: int) -> subprocess.Popen[bytes]:
            text = "nobody can fork"
            raise StartError(text)

        return Launch([], tmp_path / child, fork=fork) if child != "z" else Launch(python(WAITS), tmp_path / "z")

    made = running(tree_of(("z", *"abcdefgh"), launch, intensity=3))
    report = made.end()
    assert report is not None
    assert report.child == "d"
    assert report.reason.endswith("could not be started: nobody can fork")
    assert [seen.child for seen in made.recorder.all if seen.what == "ended"] == ["a", "b", "c", "d", "z"]


def test_children_wait_for_can_start_and_can_be_stopped_meanwhile(tmp_path: Path) -> None:
    opened, asked = threading.Event(), threading.Semaphore(0)

    def gate() -> bool:
        asked.release()
        return opened.is_set()

    def launch(child: str) -> Launch:
        return Launch(python(WAITS), tmp_path / child, can_start=gate)

    made = running(tree_of(("a", "b"), launch, start_deadline=0.5))
    # The wait does not count against the start deadline.
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert asked.acquire(timeout=PATIENCE)
    assert made.recorder.all == []
    opened.set()
    assert {made.until("ready").child, made.until("ready").child} == {"a", "b"}
    assert made.stop() is None
    opened.clear()
    made = running(tree_of(("a", "b"), launch))
    assert asked.acquire(timeout=PATIENCE)
    assert made.stop() is None
    assert made.recorder.all == []


def test_fork_that_ends_before_it_is_watched_keeps_its_outcome_and_leaks_no_descriptor(tmp_path: Path) -> None:
    def fork(_log: int, status: int) -> subprocess.Popen[bytes]:
        script = HEAD.replace(f'int(os.environ["{STATUS_FD}"])', str(status)) + "say(failed='boom')\nsys.exit(70)\n"
        child = subprocess.Popen(python(script), pass_fds=(status,))
        child.wait()
        return child

    before = len(list(Path("/proc/self/fd").iterdir()))
    made = running(tree_of(("a",), lambda _: Launch([], tmp_path / "a", tmp_path / "box", fork=fork), intensity=3))
    report = made.end()
    assert report is not None
    assert report.reason.endswith("Last failure: exit code 70: boom")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_log_is_rotated_while_its_writer_runs(run: RunTree, tmp_path: Path) -> None:
    script = READY + "while True:\n    os.write(1, b'x' * 65536)\n    signal.sigtimedwait([], 0.002)\n"
    running = run({"a": script})
    log, older = tmp_path / "logs" / "a", tmp_path / "logs" / "a.1"
    end, most, now = time.monotonic() + PATIENCE, 0, 0
    while now == most or not older.exists():
        assert time.monotonic() < end
        time.sleep(0.001)
        now = log.stat().st_size if log.exists() else 0
        most = max(most, now)
    assert older.stat().st_size > LOG_BYTES
    assert [seen.what for seen in running.recorder.all] == ["started", "ready"]


def test_children_are_listed_while_another_thread_adds_pools(tmp_path: Path) -> None:
    def pool(name: str) -> Supervisor:
        return Supervisor([ChildSpec(name)], Limits(1, 60.0), Backoff(0.01, 0.05), random.Random(1))

    first, more = ({str(n): pool(str(n)) for n in numbers} for numbers in (range(1000), range(1000, 3000)))
    tree = ProcessTree(dict(first), lambda child: Launch(python(WAITS), tmp_path / child), Recorder(), 60.0)
    adding = threading.Thread(target=lambda: [tree.pools.update({name: more[name]}) for name in more])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        adding.start()
        while adding.is_alive():
            assert set(tree.children()) >= set(first)
    finally:
        sys.setswitchinterval(interval)
        adding.join()
    assert set(tree.children()) == {*first, *more}
