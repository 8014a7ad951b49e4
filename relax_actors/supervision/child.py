"""Running process of a child: its status pipe, its signs of life, and its end."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from broker.process import kill_group, spawn
from relax_actors.runtime.blackbox import BlackBox, Snapshot
from relax_actors.runtime.logs import rotate
from relax_actors.runtime.watchdog import enumerate_rows
from relax_actors.supervision.environment import without_secrets
from relax_actors.supervision.launch import Launch, Process
from relax_actors.supervision.outcome import STATUS_FD, ReportedStatus, Verdict, is_stopped, memory_kills, outcome_of
from relax_actors.supervision.spec import RETURN_ROWS, Blame, Exit
from relax_actors.supervision.start_progress import StartProgress
from relax_actors.supervision.supervisor import ChildState, Phase

CHECK_SECONDS = 1.0
MAX_STATUS_BYTES = 1 << 20
RETURN_SECONDS, RETURN_SHARE = 2.0, 0.25
"""Time that an actor has to return its rows before it is killed, and the most of its time to stop that this may be."""


@dataclass(slots=True)
class ChildProcess:
    """One incarnation of a child.

    `pidfd` is None if the process had already ended when it was to be watched; `exited` says that it has ended.
    """

    process: Process
    pidfd: int | None
    pipe: int
    began: float
    box: BlackBox | None
    launch: Launch
    memory_kills: int | None
    start_progress: StartProgress
    exited: bool = False
    text: bytes = b""
    status: ReportedStatus = field(default_factory=ReportedStatus)
    verdict: Verdict | None = None
    kill_at: float | None = None
    asked_at: float = 0.0
    returning: bool = False
    checked_at: float = 0.0

    def read_status(self) -> bool:
        """Read what the child reported; return False at the end of the pipe."""
        try:
            data = os.read(self.pipe, 65536)
        except BlockingIOError:
            return True  # an event for the pipe of the previous incarnation
        self.text += data
        *lines, self.text = self.text.split(b"\n")
        self.text = self.text[:MAX_STATUS_BYTES]
        for line in lines:
            with suppress(ValueError, TypeError, RecursionError):  # the child may run hostile code
                message: Any = json.loads(line)
                if isinstance(message, dict):
                    self.status.update(message)
        return bool(data)

    def check(self, now: float, since: float, heartbeat: float) -> Verdict | None:
        """Return why a ready child must be killed, or None.

        Args:
            now: seconds on the monotonic clock.
            since: time until which no sign of life could be expected.
            heartbeat: seconds without a sign of life that are allowed.
        """
        verdict = None
        if self.box is not None and (silent := now - max(self.box.last_beat(), since)) > heartbeat:
            rows = self.box.read().rows
            doing = f" while handling {enumerate_rows(rows)}" if rows else ""
            verdict = Verdict(f"no progress for {silent:.1f} s{doing}: no sign of life (supervision.heartbeat)")
        elif self.launch.health_check is not None and now - self.checked_at > CHECK_SECONDS:
            self.checked_at = now
            verdict = self.launch.health_check(self.process.pid)
        if verdict is None or verdict.final or not is_stopped(self.process.pid):
            return verdict
        reason = verdict.reason.replace("supervision.heartbeat", "it was stopped by a signal")
        return replace(verdict, reason=reason, blame=Blame.EXTERNAL)

    def ask_to_stop(self, now: float, seconds: float) -> None:
        """Ask the child to stop within some seconds; `press` kills it afterwards."""
        self.asked_at, self.kill_at = now, now + seconds
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def hasten(self, kill_at: float) -> None:
        """Shorten the time of a child that was asked to stop."""
        if self.kill_at is not None:
            self.kill_at = min(self.kill_at, kill_at)

    def press(self, now: float, *, returns_rows: bool) -> None:
        """Kill a child that did not stop in time; shortly before, have an actor return its rows."""
        if self.kill_at is None:
            return
        ahead = min(RETURN_SECONDS, RETURN_SHARE * (self.kill_at - self.asked_at))
        if now > self.kill_at:
            self.kill(Verdict("did not stop within its shutdown seconds"))
        elif returns_rows and not self.returning and now > self.kill_at - ahead:
            self.returning = True
            self._signal(RETURN_ROWS)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def works(self) -> bool:
        """Return whether the actor does anything but wait; callable from any thread, also while the process ends."""
        try:
            return self.box is not None and not self.box.waits()
        except OSError:  # the box was closed
            return True

    def kill(self, verdict: Verdict) -> None:
        """Kill the child's process group; the first verdict counts."""
        self.verdict = self.verdict or verdict
        kill_group(self.process.pid)

    def close(self, code: int) -> tuple[Exit, Snapshot]:
        """Clean up after the child's end; return its outcome and the last content of its black box."""
        for fd in (self.pidfd, self.pipe):
            if fd is not None:
                os.close(fd)
        kill_group(self.process.pid)
        last = self.box.read_with_deliveries() if self.box else Snapshot(0.0)
        if self.box:
            self.box.close()
        kills = memory_kills()
        out_of_memory = kills is None or kills != self.memory_kills
        cause = getattr(self.process, "cause", "")
        return outcome_of(code, self.verdict, self.status, out_of_memory=out_of_memory, cause=cause), last


def facts_of(child: ChildState, running: ChildProcess | None, epoch: float) -> dict[str, Any]:
    """Return what a supervisor publishes about a child; callable from any thread.

    `phase`, `since` (seconds since 1970), `restarts`, `crashes`, the `pid`, whether the process `works` (a process that
    is not ready works until it has ended), and what a recorder has `recorded`.

    Args:
        child: state of the child.
        running: its process, if it has one.
        epoch: time since 1970 at the origin of the monotonic clock, in seconds.
    """
    facts = {
        "phase": child.phase.value,
        "since": round(epoch + child.since, 3),
        "restarts": max(0, child.starts - 1),
        "crashes": child.crashes,
        "pid": None if running is None else running.process.pid,
        "works": running is not None and (child.phase is not Phase.READY or running.works()),
    }
    recorded = None if running is None else running.status.recorded
    return facts if recorded is None else {**facts, "recorded": recorded}


def launch_child(launch: Launch, start_progress: StartProgress) -> ChildProcess:
    """Start the process of a child, watched with `start_progress`; raises OSError or StartError."""
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    rotate(launch.log)
    box = BlackBox(launch.box) if launch.box else None
    if box:
        box.reset()
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    environment = without_secrets(os.environ, launch.secrets) | launch.environment | {STATUS_FD: str(write)}
    try:
        with launch.log.open("ab") as log:
            process: Process
            if launch.fork is not None:
                process = launch.fork(log.fileno(), write)
            else:
                process = spawn(
                    launch.command,
                    log=log,
                    environment=environment,
                    pass_fds=(write,),
                    hold_stop=launch.hold_stop,
                )
    except BaseException:
        os.close(read)
        if box:
            box.close()
        raise
    finally:
        os.close(write)
    pidfd = None
    # A forked process may already have ended and been reaped by the zygote.
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(process.pid)
    began, kills = time.monotonic(), memory_kills()
    return ChildProcess(process, pidfd, read, began, box, launch, kills, start_progress, exited=pidfd is None)
