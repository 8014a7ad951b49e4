"""A child's process while it runs: what it says, whether it lives, and how it ended."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from broker.process import kill_group, spawn
from relax_actors.runtime.blackbox import BlackBox, Snapshot
from relax_actors.runtime.logs import rotate
from relax_actors.supervision.launch import Launch, Process
from relax_actors.supervision.outcome import STATUS_FD, ReportedStatus, Verdict, is_stopped, memory_kills, outcome_of
from relax_actors.supervision.spec import Blame, Exit

CHECK_SECONDS = 1.0


@dataclass(slots=True)
class ChildProcess:
    """One life of a child. `pidfd` is None if it was gone before it could be watched; `gone` says that it has ended."""

    process: Process
    pidfd: int | None
    pipe: int
    began: float
    box: BlackBox | None
    launch: Launch
    memory_kills: int | None
    exited: bool = False
    text: bytes = b""
    status: ReportedStatus = field(default_factory=ReportedStatus)
    verdict: Verdict | None = None
    kill_at: float | None = None
    checked_at: float = 0.0

    def read_status(self) -> bool:
        """Take in what it says; False if it will say no more."""
        try:
            data = os.read(self.pipe, 65536)
        except BlockingIOError:
            return True  # an event for the pipe of the child's earlier life
        self.text += data
        *lines, self.text = self.text.split(b"\n")
        for line in lines:
            with suppress(ValueError):
                message: Any = json.loads(line)
                if isinstance(message, dict):
                    self.status.update(message)
        return bool(data)

    def check(self, now: float, since: float, heartbeat: float) -> Verdict | None:
        """Why it must be killed, if it must, given that it is ready.

        Args:
            now: seconds on the monotonic clock.
            since: up to then it could not be expected to give a sign of life.
            heartbeat: seconds without one that are allowed.
        """
        verdict = None
        if self.box is not None and (silent := now - max(self.box.read().beat, since)) > heartbeat:
            verdict = Verdict(f"no sign of life for {silent:.1f} s (supervision.heartbeat)")
        elif self.launch.health_check is not None and now - self.checked_at > CHECK_SECONDS:
            self.checked_at = now
            verdict = self.launch.health_check()
        if verdict is None or verdict.final or not is_stopped(self.process.pid):
            return verdict
        reason = verdict.reason.replace("supervision.heartbeat", "it was stopped by a signal")
        return replace(verdict, reason=reason, blame=Blame.EXTERNAL)

    def kill(self, verdict: Verdict | None) -> None:
        """Kill it, if there is a verdict."""
        if verdict is not None:
            self.verdict = self.verdict or verdict
            kill_group(self.process.pid)

    def close(self, code: int) -> tuple[Exit, Snapshot]:
        """When it has ended: how, and what its black box holds last. Nothing of it is left."""
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


def launch_child(launch: Launch) -> ChildProcess:
    """Start a child's process.

    Raises:
        OSError, StartError: it cannot be started.
    """
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    rotate(launch.log)
    box = BlackBox(launch.box) if launch.box else None
    if box:
        box.reset()
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
        if box:
            box.close()
        raise
    finally:
        os.close(write)
    pidfd = None
    # A fork may be gone already, and whoever forked it have taken word of its end.
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(process.pid)
    return ChildProcess(process, pidfd, read, time.monotonic(), box, launch, memory_kills(), exited=pidfd is None)
