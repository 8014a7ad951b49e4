"""Supervisor's end of the zygote: starts it, requests forks, checks its health, and learns how the forks ended."""

from __future__ import annotations

import errno
import itertools
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from broker.process import spawn
from relax_actors.isolation.fork_server import receive, send
from relax_actors.isolation.proc import processes
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.logs import rotate
from relax_actors.runtime.pauses import PauseDetector, tolerated_delay
from relax_actors.supervision.launch import StartError
from relax_actors.supervision.start_progress import StartProgress, usage_of
from relax_actors.supervision.zygote import PRELOADED

REPLY_SECONDS = 10.0
"""Deadline for an answer of a zygote that has imported its modules; forking takes milliseconds."""
REPORT_SECONDS = 10.0
CHECK_SECONDS = 1.5
"""Upper bound for the time between two health checks."""
log = structlog.get_logger()


class ForkedProcess:
    """A process forked by a zygote."""

    def __init__(self, name: int, pid: int, zygote: ZygoteProcess) -> None:
        self.pid, self._name = pid, name
        self.returncode: int | None = None
        self.cause = ""
        """Name of the zygote, if it died first and took this process with it."""
        self._zygote = zygote

    def poll(self) -> int | None:
        """Return the exit code as reported by the zygote; -SIGKILL if the zygote died first; None while unknown."""
        if self.returncode is None:
            alive = self._zygote.alive
            self._zygote.read_replies()
            self.returncode = self._zygote.codes.pop(self._name, None)
            if self.returncode is None and not alive:
                self.returncode, self.cause = -int(signal.SIGKILL), self._zygote.name
        return self.returncode

    def wait(self) -> int:
        """Wait for the exit code of a process that is about to end; kill a zygote that does not answer."""
        end = time.monotonic() + REPLY_SECONDS
        while (code := self.poll()) is None:
            if not self._zygote.wait_for_reply(end - time.monotonic()):
                self._zygote.end()
        return code


class ZygoteProcess:
    """One incarnation of a zygote, and what it reported about its forks."""

    def __init__(
        self, number: int, process: subprocess.Popen[bytes], connection: socket.socket, start_deadline: float
    ) -> None:
        self.name = f"zygote {number}"
        self.pid = process.pid
        self.codes: dict[int, int] = {}
        """Exit codes of the forks that have ended and that nobody has asked for, by name."""
        self.ready_at: float | None = None
        self.began, self.progress = time.monotonic(), StartProgress(start_deadline)
        self._forked: int | None = None
        self._names = itertools.count()
        self._process, self._socket = process, connection
        connection.setblocking(False)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit code of the process; None while it runs."""
        return self._process.poll()

    def read_replies(self) -> None:
        """Read what the zygote reported."""
        with suppress(OSError):
            while (report := receive(self._socket)[0]) is not None:
                if "ended" in report:
                    self.codes[report["ended"]] = report["code"]
                elif "forked" in report:
                    self._forked = report["forked"]
                else:
                    self.ready_at = time.monotonic()

    def wait_for_reply(self, seconds: float) -> bool:
        """Wait for a report or the zygote's end; return False after `seconds`."""
        # Not select.select: a node of many actors has descriptors above its limit of 1024.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def fork(self, actor: dict[str, Any], log: int, status: int) -> ForkedProcess:
        """Request a fork; see `run_actor`.

        Raises:
            OSError: the zygote has ended or does not answer.
        """
        self._forked, name = None, next(self._names)
        send(self._socket, {"fork": name, "with": actor}, (log, status))
        end = time.monotonic() + REPLY_SECONDS
        while self._forked is None:
            if not self.wait_for_reply(end - time.monotonic()):
                raise TimeoutError(errno.ETIMEDOUT, f"no answer within {REPLY_SECONDS:g} s")
            if not self.alive:
                raise ConnectionResetError(errno.ECONNRESET, f"it has ended with exit code {self.returncode}")
            self.read_replies()
        return ForkedProcess(name, self._forked, self)

    def end(self) -> None:
        """Kill the zygote, and with it all its forks."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self.close()

    def close(self) -> None:
        """Read the last reports of a zygote that has ended, and close the socket."""
        self.read_replies()
        self._socket.close()


class Zygote:
    """Client of the zygote, with one incarnation at a time. Use it in a thread that lives as long as the actors.

    Args:
        log: file for the zygote's output.
        box: its black box.
        environment: its whole environment, inherited by the actors.
        start_deadline: seconds to import in; an import that makes progress may take longer.
        heartbeat: seconds without a sign of life after which it is killed.
        modules: modules to import.
        on_importing: called every `REPORT_SECONDS` with the seconds that the import has taken so far.
    """

    def __init__(
        self,
        log: Path,
        box: Path,
        environment: dict[str, str],
        *,
        start_deadline: float,
        heartbeat: float,
        modules: Sequence[str] = PRELOADED,
        on_importing: Callable[[float], object] = lambda _: None,
    ) -> None:
        self._log, self._path, self._environment, self._modules = log, box, environment, modules
        self._box = BlackBox(box)
        self._start_deadline, self._heartbeat, self._on_importing = start_deadline, heartbeat, on_importing
        self._pauses, self._resumed_at, self._reported_at = (
            PauseDetector(CHECK_SECONDS + tolerated_delay(heartbeat)),
            0.0,
            0.0,
        )
        self._current: ZygoteProcess | None = None
        self._verdict = ""
        self._starts = 0

    def start(self) -> None:
        """Start a zygote; it imports in the background."""
        own, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "relax_actors.supervision.zygote", str(remote.fileno()), str(self._path)]
        with remote, self._log.open("ab") as log:
            process = spawn(
                [*command, *self._modules], log=log, environment=self._environment, pass_fds=(remote.fileno(),)
            )
        self._starts += 1
        self._verdict = ""
        self._current = ZygoteProcess(self._starts, process, own, self._start_deadline)
        self._reported_at = self._current.began

    def ready(self) -> bool:
        """Whether the zygote can fork; starts one if there is none, and raises StartError if that ended."""
        process = self._current
        if process is None:
            self.start()
            return False
        process.read_replies()
        if process.alive:
            return process.ready_at is not None
        self._current = None
        process.close()
        if process.ready_at is None:
            why = self._verdict or f"exit code {process.returncode}"
            modules = ", ".join(self._modules)
            msg = f"{process.name} ended before it had imported {modules} ({why}); see its log {self._log}"
            raise StartError(msg, process.name)
        self.start()
        return False

    def fork(self, arguments: list[str], environment: Mapping[str, str], log: int, status: int) -> ForkedProcess:
        """Fork an actor.

        Raises:
            StartError: the zygote did not answer and was killed; its log may name the reason.
        """
        process = self._current
        if process is None:
            msg = "there is no zygote that could fork an actor"
            raise StartError(msg)
        try:
            return process.fork({"arguments": arguments, "environment": dict(environment)}, log, status)
        except OSError as error:
            process.end()
            msg = f"{process.name} does not fork actors ({error}); see its log {self._log}"
            raise StartError(msg, process.name) from error

    def check_health(self) -> None:
        """Kill the zygote if it shows no sign of life or imports for too long; call it about once a second."""
        rotate(self._log)
        now = time.monotonic()
        if self._pauses.check(now):
            self._resumed_at = now
        process = self._current
        if process is None or not process.alive:
            return
        process.read_replies()
        if process.ready_at is None:
            since, progress = max(process.began, self._resumed_at), process.progress
            if progress.is_due(since, now):
                progress.observe(usage_of(process.pid, self._log, processes()), now)
            if why := progress.lateness(since, self._resumed_at, now):
                self._kill(process, why)
            elif now - self._reported_at > REPORT_SECONDS:
                self._reported_at = now
                self._on_importing(round(now - process.began, 1))
        elif (silent := now - max(self._box.last_beat(), process.ready_at, self._resumed_at)) > self._heartbeat:
            self._kill(process, f"no sign of life for {silent:.1f} s, supervision.heartbeat")

    def _kill(self, process: ZygoteProcess, why: str) -> None:
        self._verdict = why
        log.warning("zygote_killed", zygote=process.name, reason=why)
        process.end()

    def pids(self) -> list[int]:
        """Return the id of the zygote's process, if there is one."""
        return [self._current.pid] if self._current is not None else []

    def state(self) -> dict[str, Any]:
        """Return the zygote's `phase`, `pid`, `since` (seconds since 1970) and `restarts`; callable from any thread."""
        process = self._current
        if process is None or not process.alive:
            return {"phase": "down", "pid": None, "since": time.time(), "restarts": max(0, self._starts - 1)}
        ready = process.ready_at is not None
        since = time.time() - time.monotonic() + (process.ready_at or process.began)
        phase = "ready" if ready else "importing"
        return {"phase": phase, "pid": process.pid, "since": round(since, 3), "restarts": self._starts - 1}

    def close(self) -> None:
        """Kill the zygote, and with it all its forks."""
        if self._current is not None:
            self._current.end()
            self._current = None
