"""The interpreter of supervisors: starts processes, watches them, kills what hangs, and reports.

One thread does it all, the one that called `run`; children ask the kernel to die with it. A child tells that it is
ready, or why it fails, by a pipe; signs of life come through its black box.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from broker.process import kill_group, spawn
from relax_actors.blackbox import BlackBox, Reading
from relax_actors.errors import RelaxError
from relax_actors.supervision.logs import rotate
from relax_actors.supervision.outcome import STATUS_FD, Verdict, is_stopped, memory_kills, outcome_of
from relax_actors.supervision.spec import Blame, Exit
from relax_actors.supervision.supervisor import Action, ChildState, GiveUp, Phase, Start, Stop, Supervisor

TICK = 0.25
EXAMINE_SECONDS = 1.0


class Process(Protocol):
    """What is needed of a process, however it was started."""

    @property
    def pid(self) -> int:
        """Its id, and that of its group."""

    @property
    def returncode(self) -> int | None:
        """How it ended, once that was waited for."""

    def wait(self) -> int:
        """Wait until it has ended; gives the exit code, negative for a signal."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a child is started: the command, where its output goes, and its black box if it has one.

    A child that cannot say by the pipe that it is ready has a `probe`, which is asked again and again. One that has no
    black box may have an `examine`, asked once a second while it is ready: a verdict means that it must be killed.
    """

    command: list[str]
    log: Path
    box: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    probe: Callable[[], bool] | None = None
    examine: Callable[[], Verdict | None] | None = None
    fork: Callable[[int, int], Process] | None = None
    """Starts it instead of `command`, given descriptors for its output and its status pipe."""


class Observer(Protocol):
    """Told of everything that happens to children, in the interpreter's thread."""

    def started(self, child: str, pid: int, starts: int) -> None:
        """A process was started, for the `starts`-th time."""

    def ready(self, child: str, seconds: float) -> None:
        """A child became ready, `seconds` after its start."""

    def ended(self, child: str, outcome: Exit, last: Reading) -> None:
        """A process is gone; `last` is what its black box holds."""

    def gave_up(self, pool: str, report: GiveUp) -> None:
        """A supervisor gave up."""


@dataclass(slots=True)
class _Running:
    process: Process
    pidfd: int
    pipe: int
    began: float
    box: BlackBox | None
    launch: Launch
    memory_kills: int | None
    text: bytes = b""
    report: str = ""
    verdict: Verdict | None = None
    kill_at: float | None = None
    examined: float = 0.0


class ProcessTree:
    """Runs the children of several supervisors.

    Args:
        pools: supervisors by name; when one gives up all are stopped.
        launch: how to start a child, by its id.
        observer: told what happens.
        heartbeat: seconds without a sign of life after which a ready child is killed.
    """

    def __init__(
        self, pools: dict[str, Supervisor], launch: Callable[[str], Launch], observer: Observer, heartbeat: float
    ) -> None:
        self.pools = pools
        self.report: GiveUp | None = None
        self._launch, self._observer, self._heartbeat = launch, observer, heartbeat
        self._pool_of = {child: pool for pool in pools.values() for child in pool.children}
        self._running: dict[str, _Running] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, ("wake", ""))
        self.seen = time.monotonic()
        """When the loop last went round."""
        self._stop_asked = False
        self._over = False

    def stop(self) -> None:
        """Ask for an orderly end; from any thread or a signal handler."""
        self._stop_asked = True
        if self._over:
            return
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def kill(self, child: str, number: signal.Signals) -> bool:
        """Signal a child's process; False if there is none."""
        running = self._running.get(child)
        if running is None:
            return False
        os.kill(running.process.pid, number)
        return True

    def states(self) -> dict[str, dict[str, Any]]:
        """Every child's `phase`, since when it is in it (seconds since 1970) and its `restarts`; from any thread."""
        epoch = time.time() - time.monotonic()
        return {
            name: {"phase": c.phase.value, "since": round(epoch + c.since, 3), "restarts": max(0, c.starts - 1)}
            for pool in self.pools.values()
            for name, c in pool.children.items()
        }

    def run(self) -> GiveUp | None:
        """Start everything and look after it until all has ended; gives the report if a supervisor gave up."""
        now = time.monotonic()
        try:
            for pool in self.pools.values():
                self._carry_out(pool.start(now))
            while not all(pool.ended for pool in self.pools.values()):
                self._wait()
                now = self.seen = time.monotonic()
                if self._stop_asked or self.report is not None:
                    self._shutdown(now)
                self._look_after(now)
                for pool in self.pools.values():
                    self._carry_out(pool.tick(now))
        finally:
            for running in self._running.values():
                kill_group(running.process.pid)
                running.process.wait()
            self._over = True
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
        return self.report

    def _shutdown(self, now: float) -> None:
        """Stop pool after pool, the last first."""
        for pool in reversed(self.pools.values()):
            self._carry_out(pool.shutdown(now))
            if not pool.ended:
                return

    def _wait(self) -> None:
        now = time.monotonic()
        dues = [due for pool in self.pools.values() if (due := pool.next_due()) is not None]
        starting = (r for child, r in self._running.items() if self._state(child).phase is Phase.STARTING)
        probing = any(running.launch.probe for running in starting)
        timeout = max(0.0, min([TICK / 10 if probing else TICK, *(due - now for due in dues)]))
        for key, _ in self._selector.select(timeout):
            kind, child = key.data
            if kind == "pipe":
                self._hear(child)
            elif kind == "pid":
                self._bury(child)
            else:
                with suppress(BlockingIOError):
                    os.read(self._wake_read, 1024)

    def _hear(self, child: str) -> None:
        running = self._running.get(child)
        if running is None:
            return
        try:
            data = os.read(running.pipe, 65536)
        except BlockingIOError:
            return  # an event for the pipe of the child's earlier life
        if not data:
            self._selector.unregister(running.pipe)
            return
        running.text += data
        *lines, running.text = running.text.split(b"\n")
        for line in lines:
            self._heard(child, running, line)

    def _heard(self, child: str, running: _Running, line: bytes) -> None:
        with suppress(ValueError):
            message: Any = json.loads(line)
            if not isinstance(message, dict):
                return
            if message.get("ready"):
                self._became_ready(child, running)
            running.report = str(message.get("failed", running.report))

    def _became_ready(self, child: str, running: _Running) -> None:
        now = time.monotonic()
        self._pool_of[child].ready(child, now)
        self._observer.ready(child, now - running.began)

    def _bury(self, child: str) -> None:
        running = self._running.pop(child)
        code = running.process.wait()
        with suppress(KeyError):
            # What it said last may still be in the pipe.
            self._selector.get_key(running.pipe)
            self._running[child] = running
            self._hear(child)
            del self._running[child]
        for fd in (running.pidfd, running.pipe):
            with suppress(KeyError):
                self._selector.unregister(fd)
            os.close(fd)
        kill_group(running.process.pid)
        last = running.box.read() if running.box else Reading(0.0)
        if running.box:
            running.box.close()
        kills = memory_kills()
        out_of_memory = kills is None or kills != running.memory_kills
        outcome = outcome_of(code, running.verdict, running.report, out_of_memory=out_of_memory)
        pool = self._pool_of[child]
        expected = pool.children[child].phase is Phase.STOPPING
        self._observer.ended(child, outcome if not expected else Exit(normal=True, reason="stopped"), last)
        self._carry_out(pool.exited(child, outcome, time.monotonic()))

    def _state(self, child: str) -> ChildState:
        return self._pool_of[child].children[child]

    def _look_after(self, now: float) -> None:
        for child, running in self._running.items():
            phase = self._state(child).phase
            if running.kill_at is not None and now > running.kill_at:
                self._condemn(running, Verdict("did not stop within its shutdown seconds"))
            elif phase is Phase.STARTING and running.launch.probe is not None and running.launch.probe():
                self._became_ready(child, running)
            elif phase is Phase.READY and running.verdict is None:
                self._condemn(running, self._examine(child, running, now))
        for pool in self.pools.values():
            for child in pool.late(now):
                if (late := self._running.get(child)) is not None and late.verdict is None:
                    self._condemn(late, Verdict("not ready in time (supervision.start_deadline)"))

    def _examine(self, child: str, running: _Running, now: float) -> Verdict | None:
        """Why a child that is ready must be killed, if it must."""
        if running.box is not None:
            silent = now - max(running.box.read().beat, self._state(child).since)
            if silent > self._heartbeat:
                stopped = is_stopped(running.process.pid)
                by = "it was stopped by a signal" if stopped else "supervision.heartbeat"
                blame = Blame.OUTSIDE if stopped else Blame.ROWS
                return Verdict(f"no sign of life for {silent:.1f} s ({by})", blame=blame)
        if running.launch.examine is not None and now - running.examined > EXAMINE_SECONDS:
            running.examined = now
            return running.launch.examine()
        return None

    @staticmethod
    def _condemn(running: _Running, verdict: Verdict | None) -> None:
        if verdict is not None:
            running.verdict = running.verdict or verdict
            kill_group(running.process.pid)

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(action.child)
            elif isinstance(action, Stop):
                running = self._running[action.child]
                spec = self._pool_of[action.child].children[action.child].spec
                running.kill_at = time.monotonic() + spec.shutdown
                with suppress(ProcessLookupError):
                    os.kill(running.process.pid, signal.SIGTERM)
                    os.kill(running.process.pid, signal.SIGCONT)
            else:
                self.report = self.report or action
                name = next(name for name, pool in self.pools.items() if action.child in pool.children)
                self._observer.gave_up(name, action)

    def _start(self, child: str) -> None:
        try:
            self._launch_child(child)
        except (OSError, RelaxError) as error:
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            outcome = Exit(normal=False, reason=f"could not be started: {error}", counted=not full)
            self._observer.ended(child, outcome, Reading(0.0))
            self._carry_out(self._pool_of[child].exited(child, outcome, time.monotonic()))

    def _launch_child(self, child: str) -> None:
        launch = self._launch(child)
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        rotate(launch.log)
        box = BlackBox(launch.box) if launch.box else None
        if box:
            box.record([], "start")
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        environment = os.environ | launch.environment | {STATUS_FD: str(write)}
        try:
            with launch.log.open("ab") as log:
                process: Process
                if launch.fork is not None:
                    process = launch.fork(log.fileno(), write)
                else:
                    process = spawn(launch.command, log=log, environment=environment, pass_fds=(write,))
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        pidfd = os.pidfd_open(process.pid)
        self._running[child] = _Running(process, pidfd, read, time.monotonic(), box, launch, memory_kills())
        self._selector.register(read, selectors.EVENT_READ, ("pipe", child))
        self._selector.register(pidfd, selectors.EVENT_READ, ("pid", child))
        self._observer.started(child, process.pid, self._pool_of[child].children[child].starts)
