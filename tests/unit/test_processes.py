"""Real processes: they are started, watched, killed when they hang, restarted, stopped in order, and none is left."""

from __future__ import annotations

import os
import queue
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from relax_actors.runtime.blackbox import BlackBox, Snapshot
from relax_actors.runtime.logs import LOG_BYTES
from relax_actors.supervision.launch import Launch, StartError
from relax_actors.supervision.outcome import STATUS_FD, ReportedStatus, Verdict, outcome_of
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.spec import Backoff, Blame, ChildSpec, Exit, Failure, Limits, Restart, Strategy
from relax_actors.supervision.supervisor import GiveUp, Supervisor

PATIENCE = 20.0
HEAD = f"""\
import os, signal, sys, json
def say(**words): os.write(int(os.environ["{STATUS_FD}"]), json.dumps(words).encode() + b"\\n")
"""
READY = HEAD + "say(ready=True)\n"
WAITS = READY + "signal.pause()\n"


def python(script: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", script]


@dataclass
class Seen:
    """One thing that the observer was told."""

    what: str
    child: str
    pid: int = 0
    starts: int = 0
    outcome: Exit | None = None
    last: Snapshot | None = None
    report: GiveUp | None = None


class Recorder:
    """Keeps what it is told for the thread of the test."""

    def __init__(self) -> None:
        self.all: list[Seen] = []
        self.queue: queue.Queue[Seen] = queue.Queue()

    def _put(self, seen: Seen) -> None:
        self.all.append(seen)
        self.queue.put(seen)

    def started(self, child: str, pid: int, starts: int) -> None:
        self._put(Seen("started", child, pid=pid, starts=starts))

    def ready(self, child: str, seconds: float) -> None:
        assert seconds >= 0
        self._put(Seen("ready", child))

    def ended(self, child: str, outcome: Exit, last: Snapshot) -> None:
        self._put(Seen("ended", child, outcome=outcome, last=last))

    def gave_up(self, pool: str, report: GiveUp) -> None:
        self._put(Seen("gave_up", pool, report=report))


@dataclass
class Running:
    """A tree in a thread of its own, as its processes die with the thread that started them."""

    tree: ProcessTree
    recorder: Recorder
    result: list[GiveUp | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=lambda: self.result.append(self.tree.run()))
        self.thread.start()

    def until(self, what: str, child: str = "", starts: int = 0) -> Seen:
        """The next such event."""
        end = time.monotonic() + PATIENCE
        while True:
            seen = self.recorder.queue.get(timeout=max(0.01, end - time.monotonic()))
            if seen.what == what and child in ("", seen.child) and seen.starts >= starts:
                return seen

    def end(self) -> GiveUp | None:
        """Wait until the tree has ended by itself."""
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        return self.result[0]

    def stop(self) -> GiveUp | None:
        if self.thread.is_alive():
            self.tree.stop()
        return self.end()

    @property
    def pids(self) -> list[int]:
        return [seen.pid for seen in self.recorder.all if seen.what == "started"]


Run = Callable[..., Running]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs a tree of children by name -> script; at the end nothing of it is left."""
    made: list[Running] = []

    def start(
        scripts: dict[str, str],
        *,
        intensity: int = 5,
        heartbeat: float = 60.0,
        boxes: tuple[str, ...] = (),
        pools: list[tuple[str, ...]] | None = None,
        **spec: Any,
    ) -> Running:
        def launch(child: str) -> Launch:
            box = tmp_path / f"{child}.box" if child in boxes else None
            return Launch(python(scripts[child]), tmp_path / "logs" / child, box, {"CHILD": child})

        groups = pools or [tuple(scripts)]
        supervisors = {
            group[0]: Supervisor(
                [ChildSpec(child, **spec) for child in group],
                Strategy.ONE_FOR_ONE,
                Limits(intensity, 60.0),
                Backoff(0.01, 0.05),
                random.Random(1),
            )
            for group in groups
        }
        recorder = Recorder()
        made.append(Running(ProcessTree(supervisors, launch, recorder, heartbeat), recorder))
        return made[-1]

    yield start
    for running in made:
        running.stop()
        assert [pid for pid in running.pids if Path(f"/proc/{pid}").exists()] == []


def test_a_child_becomes_ready_and_stops_when_told(run: Run) -> None:
    running = run({"a": HEAD + "signal.signal(15, lambda *_: sys.exit(0))\nsay(ready=True)\nsignal.pause()\n"})
    assert running.until("started", "a").starts == 1
    running.until("ready", "a")
    assert running.stop() is None
    ended = running.until("ended", "a")
    assert ended.outcome == Exit(normal=True, reason="stopped")


def test_a_crashed_child_is_started_again_with_its_last_words_kept(run: Run, tmp_path: Path) -> None:
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


def test_a_child_killed_from_outside_is_started_again_and_the_others_live_on(run: Run) -> None:
    running = run({"a": WAITS, "b": WAITS})
    first = {running.until("ready").child, running.until("ready").child}
    assert first == {"a", "b"}
    assert running.tree.kill("a", signal.SIGKILL)
    outcome = running.until("ended", "a").outcome
    assert outcome == Exit(normal=False, reason="killed by SIGKILL", blame=Blame.EXTERNAL)
    running.until("ready", "a")
    assert [seen.child for seen in running.recorder.all if seen.what == "started"] == ["a", "b", "a"]
    assert not running.tree.kill("nobody", signal.SIGKILL)


def test_the_black_box_tells_what_a_dead_child_had_in_hand(run: Run, tmp_path: Path) -> None:
    running = run({"a": WAITS}, boxes=("a",))
    running.until("ready", "a")
    BlackBox(tmp_path / "a.box").record(["group.1.2"], "the model")
    running.tree.kill("a", signal.SIGKILL)
    last = running.until("ended", "a").last
    assert last is not None
    assert (last.rows, last.waiting_for) == (("group.1.2",), "the model")
    running.until("ready", "a")
    assert BlackBox(tmp_path / "a.box").read().rows == ()


def test_a_child_that_gives_no_sign_of_life_is_killed_and_started_again(run: Run) -> None:
    running = run({"a": WAITS, "boxless": WAITS}, boxes=("a",), heartbeat=0.3)
    running.until("ready", "a")
    outcome = running.until("ended").outcome
    assert outcome is not None
    assert outcome.reason.startswith("no sign of life for")
    assert "supervision.heartbeat" in outcome.reason
    running.until("started", "a", starts=2)
    assert {seen.child for seen in running.recorder.all if seen.what == "ended"} == {"a"}


def test_a_stopped_process_is_hung_and_killed(run: Run) -> None:
    running = run({"a": WAITS}, boxes=("a",), heartbeat=0.5)
    running.until("ready", "a")
    assert running.tree.kill("a", signal.SIGSTOP)
    outcome = running.until("ended", "a").outcome
    assert outcome is not None
    assert "it was stopped by a signal" in outcome.reason
    assert outcome.blame is Blame.EXTERNAL
    running.until("started", "a", starts=2)


def test_a_child_that_its_examiner_condemns_is_killed_and_started_again(tmp_path: Path) -> None:
    verdicts = iter([None, Verdict("ill", blame=Blame.NONE), None, Verdict("worse", final=True)])
    launch = Launch(python(WAITS), tmp_path / "log", health_check=lambda: next(verdicts, None))
    made = Supervisor([ChildSpec("a")], Strategy.ONE_FOR_ONE, Limits(5, 60), Backoff(0.01, 0.01), random.Random(1))
    recorder = Recorder()
    running = Running(ProcessTree({"p": made}, lambda _: launch, recorder, 60.0), recorder)
    assert running.until("ended", "a").outcome == Exit(normal=False, reason="ill", blame=Blame.NONE)
    assert running.until("started", "a").starts == 2
    assert running.end() == GiveUp("a", "worse")


def test_the_states_of_children_can_be_asked_for(run: Run) -> None:
    running = run({"a": WAITS})
    running.until("ready", "a")
    running.tree.kill("a", signal.SIGKILL)
    running.until("ready", "a")
    state = running.tree.states()["a"]
    assert (state["phase"], state["restarts"]) == ("ready", 1)
    assert time.time() - state["since"] < PATIENCE


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
        (2, False, Blame.ROWS, True, True),
    ],
)
def test_whose_fault_a_death_was(code: int, out_of_memory: bool, blame: Blame, counted: bool, final: bool) -> None:  # noqa: FBT001
    outcome = outcome_of(code, None, ReportedStatus(), out_of_memory=out_of_memory)
    assert (outcome.blame, outcome.counted, outcome.final) == (blame, counted, final)


def test_a_child_that_beats_is_left_alone(run: Run, tmp_path: Path) -> None:
    beats = READY + (
        "import mmap, struct, time\n"
        f"m = mmap.mmap(os.open({str(tmp_path / 'a.box')!r}, os.O_RDWR), 16384)\n"
        "end = time.monotonic() + 2.0\n"
        "while time.monotonic() < end:\n    struct.pack_into('<d', m, 0, time.monotonic())\n"
        "    signal.sigtimedwait([], 0.02)\n"
    )
    running = run({"a": beats}, boxes=("a",), heartbeat=1.0, restart=Restart.TRANSIENT)
    assert running.end() is None
    assert running.until("ended", "a").outcome == Exit(normal=True, reason="ended")


def test_a_child_that_is_not_ready_in_time_is_killed_and_started_again(run: Run) -> None:
    running = run({"a": HEAD + "signal.pause()\n"}, start_deadline=0.3, boxes=("a",), heartbeat=0.05)
    outcome = running.until("ended", "a").outcome
    assert outcome is not None
    assert outcome.reason == "not ready in time (supervision.start_deadline)"
    running.until("started", "a", starts=2)


def test_a_configuration_error_ends_all_at_once(run: Run) -> None:
    running = run({"a": WAITS, "b": HEAD + "say(failed='no such key')\nsys.exit(2)\n"}, intensity=100)
    report = running.end()
    assert report == GiveUp("b", "exit code 2: no such key")
    assert [seen.starts for seen in running.recorder.all if seen.what == "started"] == [1, 1]


def test_a_child_that_keeps_failing_makes_all_pools_stop_and_the_report_holds_its_last_words(run: Run) -> None:
    bad = HEAD + "say(failed='RuntimeError: no luck')\nsys.exit(70)\n"
    running = run({"good": WAITS, "bad": bad}, intensity=2, pools=[("good",), ("bad",)])
    report = running.end()
    assert report is not None
    assert report.child == "bad"
    assert report.reason.startswith("3 failures within 60 s")
    assert report.reason.endswith("exit code 70: RuntimeError: no luck")
    gave_up = running.until("gave_up")
    assert (gave_up.child, gave_up.report) == ("bad", report)
    assert sum(seen.what == "started" and seen.child == "bad" for seen in running.recorder.all) == 3
    assert sum(seen.what == "gave_up" for seen in running.recorder.all) == 1


def test_children_are_stopped_one_by_one_the_last_pool_and_the_last_child_first(run: Run) -> None:
    running = run(dict.fromkeys("abcd", WAITS), pools=[("a", "b"), ("c", "d")])
    for _ in range(4):
        running.until("ready")
    assert running.stop() is None
    assert [seen.child for seen in running.recorder.all if seen.what == "ended"] == ["d", "c", "b", "a"]


def test_a_child_that_ignores_the_order_is_killed_after_its_shutdown_seconds(run: Run) -> None:
    stubborn = HEAD + "signal.signal(15, signal.SIG_IGN)\nsay(ready=True)\nwhile True: signal.pause()\n"
    running = run({"a": stubborn}, shutdown=0.2)
    running.until("ready", "a")
    began = time.monotonic()
    assert running.stop() is None
    assert 0.2 <= time.monotonic() - began < PATIENCE / 2


def test_a_stopped_process_can_be_told_to_end(run: Run) -> None:
    running = run({"a": WAITS}, shutdown=PATIENCE)
    running.until("ready", "a")
    running.tree.kill("a", signal.SIGSTOP)
    began = time.monotonic()
    assert running.stop() is None
    assert time.monotonic() - began < PATIENCE / 2


def test_children_of_a_dead_child_die_with_it(run: Run) -> None:
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


def test_a_child_finds_its_environment_and_writes_to_its_log(run: Run, tmp_path: Path) -> None:
    script = (
        HEAD + "print(os.environ['CHILD'], flush=True)\nprint('oh', file=sys.stderr, flush=True)\nsay(ready=True)\n"
    )
    running = run({"a": script}, restart=Restart.TRANSIENT)
    assert running.end() is None
    assert (tmp_path / "logs" / "a").read_text().split() == ["a", "oh"]


def test_a_program_that_is_not_there_fails_as_a_start_does(tmp_path: Path) -> None:
    made = Supervisor(
        [ChildSpec("a")],
        Strategy.ONE_FOR_ONE,
        Limits(1, 60),
        Backoff(0.01, 0.01),
        random.Random(1),
    )
    tree = ProcessTree({"p": made}, lambda _: Launch(["/no/such/program"], tmp_path / "log"), Recorder(), 60.0)
    report = Running(tree, Recorder()).end()
    assert report is not None
    assert report.reason.startswith("2 failures within 60 s")
    assert "/no/such/program" in (tmp_path / "log").read_text() or "No such file" in (tmp_path / "log").read_text()


def test_a_child_without_a_pipe_is_ready_when_its_probe_says_so(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    script = f"import signal; open({str(flag)!r}, 'w').close(); signal.pause()"
    made = Supervisor(
        [ChildSpec("a")],
        Strategy.ONE_FOR_ONE,
        Limits(1, 60),
        Backoff(0.01, 0.01),
        random.Random(1),
    )
    recorder = Recorder()
    launch = Launch(python(script), tmp_path / "log", probe=flag.exists)
    running = Running(ProcessTree({"p": made}, lambda _: launch, recorder, 60.0), recorder)
    running.until("ready", "a")
    assert running.stop() is None


def test_status_speaks_the_language_of_the_interpreter(run: Run, tmp_path: Path) -> None:
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


def test_without_a_supervisor_status_says_nothing() -> None:
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from relax_actors.supervision.outcome import StatusPipe\n"
        "StatusPipe().ready(); StatusPipe().failed('x')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != STATUS_FD}
    done = subprocess.run(python(script), env=environment, capture_output=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_child_dies_when_its_parent_is_killed() -> None:
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


def tree_of(
    children: tuple[str, ...], launch: Callable[[str], Launch], *, intensity: int = 5, **spec: Any
) -> ProcessTree:
    specs = [ChildSpec(child, **spec) for child in children]
    pool = Supervisor(specs, Strategy.ONE_FOR_ONE, Limits(intensity, 60), Backoff(0.01, 0.05), random.Random(1))
    return ProcessTree({"p": pool}, launch, Recorder(), 60.0)


def running(tree: ProcessTree) -> Running:
    assert isinstance(tree._observer, Recorder)
    return Running(tree, tree._observer)


def test_giving_up_while_others_are_still_to_be_started_starts_them_no_more(tmp_path: Path) -> None:
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


def test_children_wait_until_they_can_be_started_and_can_be_stopped_meanwhile(tmp_path: Path) -> None:
    opened, asked = threading.Event(), threading.Semaphore(0)

    def gate() -> bool:
        asked.release()
        return opened.is_set()

    def launch(child: str) -> Launch:
        return Launch(python(WAITS), tmp_path / child, can_start=gate)

    made = running(tree_of(("a", "b"), launch, start_deadline=0.5))
    # That a start has to wait is not held against it.
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


def test_a_fork_that_was_gone_before_it_could_be_watched_ends_as_it_did_and_leaks_nothing(tmp_path: Path) -> None:
    def fork(_log: int, status: int) -> subprocess.Popen[bytes]:
        script = HEAD.replace(f'int(os.environ["{STATUS_FD}"])', str(status)) + "say(failed='boom')\nsys.exit(70)\n"
        child = subprocess.Popen(python(script), pass_fds=(status,))
        child.wait()
        return child

    before = len(list(Path("/proc/self/fd").iterdir()))
    made = running(tree_of(("a",), lambda _: Launch([], tmp_path / "a", tmp_path / "box", fork=fork), intensity=3))
    report = made.end()
    assert report is not None
    assert report.reason.endswith("the last: exit code 70: boom")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_log_is_bounded_while_its_writer_lives(run: Run, tmp_path: Path) -> None:
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


def test_what_failed_below_a_child_comes_up_with_its_end(run: Run) -> None:
    script = READY + "say(failed='rollout.3: no')\nsay(below=['rollout.3', 'no', 'Traceback'])\nsys.exit(75)\n"
    running = run({"a": script})
    assert running.end() is not None
    outcome = running.until("ended", "a").outcome
    assert outcome is not None
    assert outcome.child_failure == Failure("rollout.3", "no", "Traceback")


def test_a_child_that_somebody_else_tells_to_end_was_stopped_from_outside(run: Run) -> None:
    handler = "signal.signal(15, lambda *_: (say(told=True), sys.exit(0)))\n"
    obeys = HEAD + handler + "say(ready=True)\nwhile True: signal.pause()\n"
    running = run({"a": obeys}, intensity=0)
    running.until("ready", "a")
    running.tree.kill("a", signal.SIGTERM)
    assert running.until("ended", "a").outcome == Exit(normal=True, reason="ended", blame=Blame.EXTERNAL)
    running.until("ready", "a")


DRAINS = HEAD + (
    "def end(*_):\n    signal.sigtimedwait([], 1.0)\n    open(os.environ['CHILD'], 'w').close()\n    sys.exit(0)\n"
    "signal.signal(15, end)\nsay(ready=True)\nwhile True: signal.pause()\n"
)


def test_one_too_many_finishes_what_it_has_in_hand(run: Run, tmp_path: Path) -> None:
    done = tmp_path / "done"
    running = run({"a": WAITS, "b": DRAINS.replace("os.environ['CHILD']", repr(str(done)))}, shutdown=0.1, drain=20.0)
    for _ in "ab":
        running.until("ready")
    running.tree.resize("a", [ChildSpec("a")])
    assert running.until("ended", "b").outcome == Exit(normal=True, reason="stopped")
    assert done.exists()


def test_one_too_many_is_not_waited_for_when_all_end(run: Run) -> None:
    stubborn = HEAD + "signal.signal(15, signal.SIG_IGN)\nsay(ready=True)\nwhile True: signal.pause()\n"
    running = run({"a": WAITS, "b": stubborn}, shutdown=0.2, drain=600.0)
    for _ in "ab":
        running.until("ready")
    running.tree.resize("a", [ChildSpec("a")])
    assert running.stop() is None


def test_a_pause_of_the_whole_machine_condemns_nobody(tmp_path: Path) -> None:
    """The supervisor and its child stand still for longer than the heartbeat, and the child wakes up last."""
    beats = READY + (
        "import mmap, struct, time\n"
        f"m = mmap.mmap(os.open({str(tmp_path / 'a.box')!r}, os.O_RDWR), 16384)\n"
        "while True:\n    struct.pack_into('<d', m, 0, time.monotonic())\n    signal.sigtimedwait([], 0.05)\n"
    )
    parent = (
        f"import sys, threading, random; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\n"
        "from tests.unit.test_processes import *\n"
        "class Says(Recorder):\n"
        "    def _put(self, seen):\n        print(seen.what, seen.pid, flush=True)\n"
        "s = Supervisor([ChildSpec('a')], Strategy.ONE_FOR_ONE, Limits(5, 60), Backoff(0.01, 0.05), random.Random(1))\n"
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
        # What is tested is how long it takes.
        assert select.select([process.stdout], [], [], 3.0)[0] == []
        os.kill(process.pid, signal.SIGCONT)
        assert select.select([process.stdout], [], [], 0.6)[0] == []
        os.kill(child, signal.SIGCONT)
        assert select.select([process.stdout], [], [], 2.5)[0] == []
        # One that is stopped alone is found out still.
        os.kill(child, signal.SIGSTOP)
        assert process.stdout.readline().startswith("ended")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def beating(tmp_path: Path) -> Iterator[Callable[[float, Callable[[int], None]], Running]]:
    """Runs a child that beats every 50 ms under a supervisor whose periodic are told its pid once it is ready."""
    made: list[Running] = []
    box = tmp_path / "a.box"
    beats = READY + (
        "import mmap, struct, time\n"
        f"m = mmap.mmap(os.open({str(box)!r}, os.O_RDWR), 16384)\n"
        "while True:\n    struct.pack_into('<d', m, 0, time.monotonic())\n    signal.sigtimedwait([], 0.05)\n"
    )

    def start(heartbeat: float, periodic: Callable[[int], None]) -> Running:
        child = ChildSpec("a")
        supervisor = Supervisor([child], Strategy.ONE_FOR_ONE, Limits(5, 60), Backoff(0.01, 0.05), random.Random(1))
        recorder, pids = Recorder(), list[int]()
        launch = Launch(python(beats), tmp_path / "log", box)
        tree = ProcessTree({"p": supervisor}, lambda _: launch, recorder, heartbeat, lambda: [*map(periodic, pids)])
        made.append(running := Running(tree, recorder))
        started = running.until("started").pid
        running.until("ready")
        pids.append(started)
        return running

    yield start
    for running in made:
        assert running.stop() is None


def test_a_pause_outside_the_wait_condemns_nobody(beating: Callable[..., Running]) -> None:
    """All stand still while the supervisor does its periodic, and the child wakes up last."""
    allow_for_pause = threading.Event()

    def periodic(child: int) -> None:
        if not allow_for_pause.is_set():
            os.kill(child, signal.SIGSTOP)
            time.sleep(3.0)  # the pause
            threading.Timer(0.5, os.kill, (child, signal.SIGCONT)).start()
            allow_for_pause.set()

    running = beating(1.5, periodic)
    assert allow_for_pause.wait(PATIENCE)
    with pytest.raises(queue.Empty):
        running.recorder.queue.get(timeout=3.0)


def test_a_supervisor_held_up_in_every_round_finds_a_hung_child(beating: Callable[..., Running]) -> None:
    stopped: list[int] = []

    def periodic(child: int) -> None:
        if not stopped:
            os.kill(child, signal.SIGSTOP)
            stopped.append(child)
        time.sleep(1.1)  # what holds it up

    outcome = beating(1.5, periodic).until("ended").outcome
    assert outcome is not None
    assert "stopped by a signal" in str(outcome)
