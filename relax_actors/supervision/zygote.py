"""A process that has imported what takes seconds to import, and forks actors that need it.

A fork has torch and transformers at once, so an actor that was killed is back in a fraction of the time, and two of
them start for the price of one import. The zygote has one thread and has initialised no device, so that a fork of it is
safe. Its children die with it, as it dies with its parent.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from broker.process import spawn
from relax_actors.errors import RelaxError
from relax_actors.supervision.logs import rotate
from relax_actors.supervision.outcome import STATUS_FD

HOST = "relax_actors.supervision.host"
PRELOADED = (
    "relax_actors.supervision.host",
    "relax_actors.engines.inference.transformers_engine",
    "relax_actors.engines.training.torch_engine",
    "relax_actors.engines.scoring.torch_engine",
)
PRELOADED_MODELLED = ("relax_actors.supervision.host", "relax_actors.roles.rollout", "relax_actors.roles.trainer")
"""Of engines that are only modelled: without torch."""
_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE = 1 << 16
REPLY_SECONDS = 60.0


class Forked:
    """A process that a zygote forked."""

    def __init__(self, pid: int, zygote: Zygote) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote

    def wait(self) -> int:
        """The exit code as the zygote saw it; -SIGKILL if the zygote is gone too, for then it was killed with it."""
        if self.returncode is None:
            self.returncode = self._zygote.exit_code(self.pid)
        return self.returncode


class Zygote:
    """The supervisor's end. Start it from a thread that lives as long as the actors may.

    Args:
        log: file for what it prints.
        environment: its whole environment, and that of the actors.
        modules: what it imports.
    """

    def __init__(self, log: Path, environment: dict[str, str], modules: Sequence[str] = PRELOADED) -> None:
        self._log, self._environment, self._modules = log, environment, modules
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._codes: dict[int, int] = {}

    def start(self) -> None:
        """Start it; it imports in the background."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        rotate(self._log)
        command = [sys.executable, "-m", "relax_actors.supervision.zygote", str(theirs.fileno()), *self._modules]
        with self._log.open("ab") as log:
            self._process = spawn(command, log=log, environment=self._environment, pass_fds=(theirs.fileno(),))
        theirs.close()
        ours.settimeout(REPLY_SECONDS)
        self._socket = ours

    def fork(self, arguments: list[str], log: int, status: int) -> Forked:
        """Fork an actor: `arguments` of the host's `main`, descriptors for its output and its status pipe.

        Raises:
            RelaxError: the zygote died twice over it; its log says why.
        """
        for _ in range(2):
            if self._socket is None or self._process is None or self._process.poll() is not None:
                self.close()
                self.start()
            try:
                return Forked(self._ask(arguments, log, status), self)
            except OSError:
                self.close()
        msg = f"the zygote cannot fork actors; its log is {self._log}"
        raise RelaxError(msg)

    def _ask(self, arguments: list[str], log: int, status: int) -> int:
        if self._socket is None:
            raise ConnectionError
        socket.send_fds(self._socket, [json.dumps(arguments).encode()], [log, status])
        while True:
            reply = self._receive()
            if "forked" in reply:
                return int(reply["forked"])

    def _receive(self) -> dict[str, Any]:
        if self._socket is None:
            raise ConnectionError
        data = self._socket.recv(_MAX_MESSAGE)
        if not data:
            raise ConnectionError
        reply: dict[str, Any] = json.loads(data)
        if "ended" in reply:
            self._codes[int(reply["ended"])] = int(reply["code"])
        return reply

    def exit_code(self, pid: int) -> int:
        """How a forked process ended, waiting for word of it."""
        with suppress(OSError):
            while pid not in self._codes:
                self._receive()
        return self._codes.pop(pid, -int(signal.SIGKILL))

    def close(self) -> None:
        """End it, and with it all that it forked."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            self._process = None


def _serve(connection: socket.socket) -> None:
    """The zygote's loop: fork on request, reap, report."""
    own = os.getpid()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    while True:
        readable, _, _ = select.select([connection.fileno(), wake_read], [], [])
        if wake_read in readable:
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
            _reap(connection)
        if connection.fileno() in readable:
            data, fds = _receive_fds(connection)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                connection.close()
                _become_actor(own, json.loads(data), *fds)
            for fd in fds:
                os.close(fd)
            connection.send(json.dumps({"forked": pid}).encode())


def _receive_fds(connection: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(_MAX_MESSAGE, socket.CMSG_LEN(2 * fds.itemsize))
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
    return data, list(fds)


def _reap(connection: socket.socket) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            connection.send(json.dumps({"ended": pid, "code": code}).encode())


def _become_actor(parent: int, arguments: list[str], log: int, status: int) -> NoReturn:
    """In the fork: a session of its own, the parent's death its own, its own output; then live as an actor.

    `parent` was looked up before the fork: a fork whose zygote is gone already must end, for nobody knows of it.
    """
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Named as if it had been started, for `ps` and for whoever looks a process up by its command line.
        setproctitle.setproctitle(" ".join([sys.executable, "-m", HOST, *arguments]))
        from relax_actors.supervision import host  # noqa: PLC0415 the actor's own

        os.environ[STATUS_FD] = str(status)
        host.main(arguments)
    except BaseException:  # noqa: BLE001 a fork must never return into the zygote's loop
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def main() -> None:
    """Entry point of the zygote's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    began = time.monotonic()
    modules = sys.argv[2:]
    for name in modules:
        __import__(name)
    sys.stderr.write(f"preloaded {', '.join(modules)} in {time.monotonic() - began:.1f} s\n")
    sys.stderr.flush()
    _serve(connection)


if __name__ == "__main__":
    main()
