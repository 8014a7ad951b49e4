"""Process tree: the interpreter of supervisors, which starts, watches and kills processes.

Everything happens in the thread that called `run`; children ask the kernel to die with it. A child reports by a pipe
that it is ready, or why it fails; its signs of life come through its black box.
"""

from __future__ import annotations

import errno
import os
import queue
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import structlog

from broker.process import kill_group
from relax_actors.errors import RelaxError
from relax_actors.isolation.orphans import kill_orphans
from relax_actors.runtime.blackbox import Snapshot
from relax_actors.runtime.logs import rotate
from relax_actors.runtime.pauses import PauseDetector, tolerated_delay
from relax_actors.supervision.child import CHECK_SECONDS, ChildProcess, facts_of, launch_child
from relax_actors.supervision.launch import Launch, Observer, StartError
from relax_actors.supervision.outcome import Verdict
from relax_actors.supervision.spec import ChildSpec, Exit
from relax_actors.supervision.start_progress import StartProgress
from relax_actors.supervision.start_watch import late_starts
from relax_actors.supervision.supervisor import Action, ChildState, GiveUp, Phase, Start, Stop, Supervisor

TICK = 0.25
log = structlog.get_logger()


class ProcessTree:
    """Runs the children of several supervisors.

    Args:
        pools: supervisors by name, in start order; when one gives up all are stopped.
        launch: returns how to start a child, by its id.
        observer: receives the children's events.
        heartbeat: seconds without a sign of life after which a ready child is killed.
        periodic: called once a second, in the tree's thread.
    """

    def __init__(
        self,
        pools: dict[str, Supervisor],
        launch: Callable[[str], Launch],
        observer: Observer,
        heartbeat: float,
        periodic: Callable[[], object] = lambda: None,
    ) -> None:
        self.pools = pools
        self.report: GiveUp | None = None
        self._launch, self._observer, self._heartbeat = launch, observer, heartbeat
        self._pool_of = {child: pool for pool in pools.values() for child in pool.children}
        self._resizes: queue.SimpleQueue[tuple[str, Sequence[ChildSpec], Supervisor | None]] = queue.SimpleQueue()
        self._running: dict[str, ChildProcess] = {}
        self._waiting: dict[str, Launch] = {}
        self._actions: deque[Action] = deque()
        self._acting = False
        self._pauses, self._resumed_at = PauseDetector(TICK + tolerated_delay(heartbeat)), 0.0
        self._periodic, self._periodic_at = periodic, 0.0
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, ("wake", ""))
        self.is_spared: Callable[[int], bool] = lambda _pid: True
        """Whether a process that leads or joined another session, and is no child, survives the end of a child."""
        self._orphans_due, self._swept_at = False, 0.0
        self.last_loop = time.monotonic()
        """Time of the loop's last iteration, in seconds on the monotonic clock."""
        self._stop_requested, self._stop_by = False, float("inf")
        self._closed = False

    def stop(self) -> None:
        """Request an orderly end; callable from any thread and from signal handlers."""
        self._stop_requested = True
        self._wake()

    def limit_stop(self, seconds: float) -> None:
        """Kill children that have not stopped in `seconds` from now, whatever their specs allow."""
        self._stop_by = time.monotonic() + seconds
        for running in list(self._running.values()):
            running.hasten(self._stop_by)

    def _wake(self) -> None:
        if not self._closed:
            with suppress(BlockingIOError):
                os.write(self._wake_write, b"x")

    def resize(self, pool: str, specs: Sequence[ChildSpec], added: Supervisor | None = None) -> None:
        """Set the children of a pool, or of a pool that is `added`, without children; callable from any thread."""
        self._resizes.put((pool, specs, added))
        self._wake()

    def kill(self, child: str, number: signal.Signals) -> bool:
        """Send a signal to a child's process; return False if there is none."""
        if (running := self._running.get(child)) is not None:
            os.kill(running.process.pid, number)
        return running is not None

    def children(self) -> list[str]:
        """Return the names of the present children; callable from any thread, also while pools are added."""
        return [name for pool in list(self.pools.values()) for name in list(pool.children)]

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the facts of each child (`facts_of`); callable from any thread.

        They are read now, since the loop may take long for an iteration.
        """
        epoch = time.time() - time.monotonic()
        return {
            name: facts_of(state, self._running.get(name), epoch)
            for pool in list(self.pools.values())
            for name, state in list(pool.children.items())
        }

    def run(self) -> GiveUp | None:
        """Start all children and supervise them until all have ended; return the report if a supervisor gave up."""
        now, worked, held_up = time.monotonic(), time.thread_time(), 0.0
        try:
            for pool in self.pools.values():
                self._carry_out(pool.start(now))
            while not all(pool.ended for pool in self.pools.values()):
                # A pause can also fall between two waits. Work of this thread is none, nor is a delay in each round.
                now, before = time.monotonic(), held_up
                held_up = self._pauses.check(now, time.thread_time() - worked)
                self._allow_for_pause(0.0 if before else held_up, now)
                self._wait()
                worked = time.thread_time()
                now = self.last_loop = time.monotonic()
                self._allow_for_pause(self._pauses.check(now), now)
                while not self._resizes.empty():
                    self._resize(*self._resizes.get(), now)
                if self._stop_requested or self.report is not None:
                    self._shutdown(now)
                self._check_children(now)
                if self._orphans_due and now - self._swept_at > TICK:
                    self._kill_orphans(now)
                self._start_waiting()
                for pool in self.pools.values():
                    self._carry_out(pool.tick(now))
                if now - self._periodic_at > CHECK_SECONDS:
                    self._periodic_at = now
                    self._periodic()
                    for running in self._running.values():
                        rotate(running.launch.log)
        finally:
            for running in self._running.values():
                kill_group(running.process.pid)
                running.process.wait()
            self._running.clear()
            self._kill_orphans(time.monotonic())
            self._closed = True
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
        return self.report

    def _kill_orphans(self, now: float) -> None:
        """Kill what ended children have left: processes that they started, whatever sessions these have made."""
        self._orphans_due, self._swept_at = False, now
        known = {running.process.pid for running in self._running.values()}
        if killed := kill_orphans(known, self.is_spared):
            log.warning("orphans_killed", pids=killed)

    def _allow_for_pause(self, pause: float, now: float) -> None:
        """Extend all deadlines by a pause, since no child could give a sign of life."""
        if pause:
            self._resumed_at = now
            for running in self._running.values():
                if running.kill_at is not None:
                    running.kill_at += pause
            for pool in self.pools.values():
                pool.allow_for_pause(pause)

    def _resize(self, name: str, specs: Sequence[ChildSpec], added: Supervisor | None, now: float) -> None:
        if added is not None and name not in self.pools:
            self.pools[name] = added
            self._carry_out(added.start(now))
        pool = self.pools[name]
        self._pool_of |= {spec.id: pool for spec in specs}
        self._carry_out(pool.resize(specs, now))

    def _shutdown(self, now: float) -> None:
        """Stop the pools one after the other, in reverse start order."""
        for child, running in self._running.items():
            if running.kill_at is not None and (state := self._state(child)).leaving:
                running.hasten(now + state.spec.shutdown)
        for pool in reversed(self.pools.values()):
            self._carry_out(pool.shutdown(now))
            if not pool.ended:
                return

    def _wait(self) -> None:
        now = time.monotonic()
        dues = [due for pool in self.pools.values() if (due := pool.next_due()) is not None]
        starting = (r for child, r in self._running.items() if self._state(child).phase is Phase.STARTING)
        probing = any(r.launch.probe for r in starting) or any(r.exited for r in self._running.values())
        probing = probing or bool(self._waiting)
        timeout = max(0.0, min([TICK / 10 if probing else TICK, *(due - now for due in dues)]))
        for key, _ in self._selector.select(timeout):
            kind, child = key.data
            if kind == "pipe":
                self._read_status(child)
            elif kind == "pid":
                if child in self._running:
                    self._reap(child)
            else:
                with suppress(BlockingIOError):
                    os.read(self._wake_read, 1024)

    def _read_status(self, child: str) -> None:
        running = self._running.get(child)
        if running is None:
            return
        was_ready = running.status.ready
        if not running.read_status():
            self._selector.unregister(running.pipe)
        if running.status.ready and not was_ready:
            self._became_ready(child, running)

    def _became_ready(self, child: str, running: ChildProcess) -> None:
        now = time.monotonic()
        self._pool_of[child].ready(child, now)
        self._observer.ready(child, now - running.began)

    def _reap(self, child: str) -> None:
        running = self._running[child]
        code = running.process.poll()
        if code is None:
            # The zygote has not reported the exit code yet.
            if running.pidfd is not None and not running.exited:
                self._selector.unregister(running.pidfd)
            running.exited = True
            return
        with suppress(KeyError):
            # The pipe may still hold the child's last report.
            self._selector.get_key(running.pipe)
            self._read_status(child)
        del self._running[child]
        for fd in (running.pidfd, running.pipe):
            if fd is not None:
                with suppress(KeyError):
                    self._selector.unregister(fd)
        self._orphans_due = True
        outcome, last = running.close(code)
        pool = self._pool_of[child]
        expected = pool.children[child].phase is Phase.STOPPING
        stopped = Exit(normal=True, reason="stopped", held_rows=not outcome.normal)
        self._observer.ended(child, stopped if expected else outcome, last)
        self._carry_out(pool.exited(child, outcome, time.monotonic()))

    def _state(self, child: str) -> ChildState:
        return self._pool_of[child].children[child]

    def _check_children(self, now: float) -> None:
        for child, running in list(self._running.items()):
            phase = self._state(child).phase
            if running.exited:
                self._reap(child)
            elif running.kill_at is not None:
                running.press(now, returns_rows=self._state(child).spec.returns_rows)
            elif phase is Phase.STARTING and running.launch.probe is not None and running.launch.probe():
                self._became_ready(child, running)
            elif phase is Phase.READY and running.verdict is None:
                since = max(self._state(child).since, self._resumed_at)
                if (verdict := running.check(now, since, self._heartbeat)) is not None:
                    running.kill(verdict)
        for late, why in late_starts(self.pools.values(), self._running, self._resumed_at, now):
            late.kill(Verdict(why))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        """Carry out actions in order; the actions that one of them causes come directly after it."""
        self._actions.extendleft(reversed(list(actions)))
        if self._acting:
            return
        self._acting = True
        try:
            while self._actions:
                self._act(self._actions.popleft())
                self.last_loop = time.monotonic()
        finally:
            self._acting = False

    def _act(self, action: Action) -> None:
        child = action.child
        if isinstance(action, Start):
            state = self._pool_of[child].children.get(child)
            # An earlier action of the list may have made the supervisor give up.
            if state is not None and state.phase is Phase.STARTING and child not in self._running:
                self._start(child, None)
        elif isinstance(action, Stop):
            self._stop(child)
        else:
            self.report = self.report or action
            name = next(name for name, pool in self.pools.items() if child in pool.children)
            self._observer.gave_up(name, action)

    def _stop(self, child: str) -> None:
        running, state, now = self._running.get(child), self._state(child), time.monotonic()
        if running is None:
            self._waiting.pop(child, None)
            self._carry_out(self._pool_of[child].exited(child, Exit(normal=True, reason="never started"), now))
            return
        drains = state.leaving and state.spec.drain is not None
        seconds = state.spec.drain or 0.0 if drains else state.spec.shutdown
        running.ask_to_stop(now, min(seconds, self._stop_by - now))

    def _start_waiting(self) -> None:
        """Start the children whose `can_start` refused before and does not refuse now, in order."""
        for child, launch in list(self._waiting.items()):
            if child in self._waiting:
                self._start(child, launch)

    def _start(self, child: str, launch: Launch | None) -> bool:
        """Start a child; return False if it must wait."""
        try:
            launch = launch or self._launch(child)
            if launch.can_start is not None and not launch.can_start():
                self._waiting[child] = launch
                return False
            self._waiting.pop(child, None)
            self._launch_child(child, launch)
        except (OSError, RelaxError) as error:
            self._waiting.pop(child, None)
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            cause = error.cause if isinstance(error, StartError) else ""
            outcome = Exit(normal=False, reason=f"could not be started: {error}", counted=not full, cause=cause)
            self._observer.ended(child, outcome, Snapshot(0.0))
            self._carry_out(self._pool_of[child].exited(child, outcome, time.monotonic()))
        return True

    def _launch_child(self, child: str, launch: Launch) -> None:
        running = launch_child(launch, StartProgress(self._state(child).spec.start_deadline))
        if running.pidfd is not None:
            self._selector.register(running.pidfd, selectors.EVENT_READ, ("pid", child))
        self._selector.register(running.pipe, selectors.EVENT_READ, ("pipe", child))
        self._running[child] = running
        self._pool_of[child].process_started(child, running.began)
        self._observer.started(child, running.process.pid, self._pool_of[child].children[child].starts)
