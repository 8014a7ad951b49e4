"""Fork server: a zygote's loop, which forks processes with modules imported.

A zygote has one thread and initialises no device, so that forking is safe. Its forks die with it, as it dies with its
parent. Requests and reports are JSON on a socket of packets:

    {"fork": id, "with": arguments}, with descriptors -> {"forked": pid}
    {"kill": id}
    at the end of a fork, killed with all that it started -> {"ended": id, "code": exit code}

Ids are the client's and name a fork for good; a process id may come to another process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from broker.process import kill_group
from relax_actors.isolation.orphans import become_subreaper, die_with_parent, kill_orphans

MAX_MESSAGE, MAX_DESCRIPTORS = 1 << 16, 2
BEAT_SECONDS = 0.5


def send(connection: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Send a request or a report."""
    socket.send_fds(connection, [json.dumps(message).encode()], descriptors)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive a request or a report, and its descriptors; None if the other side has ended."""
    data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE, MAX_DESCRIPTORS)
    return (json.loads(data) if data else None), descriptors


class ForkServer:
    """Forks processes until its client ends.

    `run` runs in a fork, with the arguments and descriptors of its request; the fork ends when it returns. `beat` is
    called at least every `BEAT_SECONDS`.
    """

    def __init__(
        self, connection: socket.socket, run: Callable[..., object], beat: Callable[[], object] = lambda: None
    ) -> None:
        self._connection, self._run, self._beat = connection, run, beat
        self._forks: dict[int, int] = {}
        """The client's id of each fork, by its process id."""
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Fork on request, and report the ends of forks; at the client's end kill all that run."""
        become_subreaper()
        requests, wake = self._connection.fileno(), self._wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken)
        while True:
            readable, _, _ = select.select([requests, wake], [], [], BEAT_SECONDS)
            self._beat()
            if wake in readable:
                with suppress(BlockingIOError):
                    os.read(wake, 4096)
                self._reap()
            if requests in readable:
                request, descriptors = receive(self._connection)
                if request is None:
                    break
                self._handle(request, descriptors)
        for pid in self._forks:
            kill_group(pid)

    def _handle(self, request: dict[str, Any], descriptors: list[int]) -> None:
        if "kill" in request:
            for pid in (pid for pid, name in self._forks.items() if name == request["kill"]):
                os.kill(pid, signal.SIGKILL)  # its group when it has ended
            return
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(own, request["with"], descriptors)
        self._forks[pid] = request["fork"]
        for descriptor in descriptors:
            os.close(descriptor)
        self._report({"forked": pid})

    def _reap(self) -> None:
        """Collect ended children, and report forks once all that they started ended."""
        ended = {}
        with suppress(ChildProcessError):
            # The group of a fork has its id, which is its own until it is waited for.
            while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if child.si_pid in self._forks:
                    kill_group(child.si_pid)
                code = os.waitstatus_to_exitcode(os.waitpid(child.si_pid, 0)[1])
                if (name := self._forks.pop(child.si_pid, None)) is not None:
                    ended[name] = code
        if ended:
            kill_orphans(self._forks)
        for name, code in ended.items():
            self._report({"ended": name, "code": code})

    def _report(self, report: dict[str, Any]) -> None:
        with suppress(ConnectionError):  # seen at the next request
            send(self._connection, report)

    def _become(self, parent: int, arguments: Any, descriptors: list[int]) -> NoReturn:
        """Make the fork a process of its own, which dies with its parent; run it."""
        code = 1
        try:
            os.setsid()
            die_with_parent(parent)
            become_subreaper()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (self._wake, self._woken):
                os.close(descriptor)
            self._connection.close()
            self._run(arguments, *descriptors)
            code = 0
        except BaseException:  # noqa: BLE001 a fork must never return into the zygote's loop
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
