"""Zygote: a process that has imported torch and transformers, and forks actors that need them.

A fork has the modules at once, so a killed actor is back in a fraction of the time, and several actors cost one import.
The zygote has one thread and initialises no device, so that forking is safe. Its forks die with it, as it dies with its
parent.
"""

from __future__ import annotations

import array
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import setproctitle

from broker.orphans import become_subreaper, kill_orphans
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.supervision.outcome import STATUS_FD

ACTOR_MODULE = "relax_actors.supervision.actor_process"
PRELOADED = (
    "relax_actors.supervision.actor_process",
    "relax_actors.engines.torch.lean_imports",
    "relax_actors.engines.transformers.engine",
    "relax_actors.engines.torch.engine",
    "relax_actors.engines.torch.scorer",
)
PRELOADED_SIMULATED = (
    "relax_actors.supervision.actor_process",
    "relax_actors.roles.rollout",
    "relax_actors.roles.trainer",
)
"""Modules for simulated engines, without torch."""
_PR_SET_PDEATHSIG = 1
MAX_MESSAGE = 1 << 16
BEAT_SECONDS = 0.5


def _serve(connection: socket.socket, box: BlackBox) -> None:
    """Fork on request, reap and report the forks' ends, and record signs of life."""
    own = os.getpid()
    forks: set[int] = set()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    while True:
        readable, _, _ = select.select([connection.fileno(), wake_read], [], [], BEAT_SECONDS)
        box.beat()
        if wake_read in readable:
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
            if _reap(connection, forks):
                kill_orphans(forks)
        if connection.fileno() in readable:
            data, fds = _receive_fds(connection)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                connection.close()
                _become_actor(own, json.loads(data), *fds)
            forks.add(pid)
            for fd in fds:
                os.close(fd)
            connection.send(json.dumps({"forked": pid}).encode())


def _receive_fds(connection: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(MAX_MESSAGE, socket.CMSG_LEN(2 * fds.itemsize))
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
    return data, list(fds)


def _reap(connection: socket.socket, forks: set[int]) -> bool:
    """Collect all ended children, and report the forks among them; return whether there were any."""
    before = len(forks)
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid in forks:
                forks.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                connection.send(json.dumps({"ended": pid, "code": code}).encode())
    return len(forks) < before


def _become_actor(parent: int, arguments: list[str], log: int, status: int) -> NoReturn:
    """Turn the fork into an actor: its own session and output, death with its parent; then run the actor.

    `parent` is the zygote's pid, read before the fork: if the zygote has died since, no supervisor knows of the fork,
    which must exit.
    """
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        become_subreaper()
        if os.getppid() != parent:
            os._exit(1)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Show the command line of a started actor, for `ps` and for searches by command line.
        setproctitle.setproctitle(" ".join([sys.executable, "-m", ACTOR_MODULE, *arguments]))
        from relax_actors.supervision import actor_process  # noqa: PLC0415 preloaded by the zygote

        os.environ[STATUS_FD] = str(status)
        actor_process.main(arguments)
    except BaseException:  # noqa: BLE001 a fork must never return into the zygote's loop
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def main() -> None:
    """Run the zygote; the process's entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    began = time.monotonic()
    box = BlackBox(Path(sys.argv[2]))
    modules = sys.argv[3:]
    for name in modules:
        __import__(name)
    # Forks leave the modules' objects out of garbage collection: to look at all of them takes 0.3 s of a training step.
    gc.freeze()
    sys.stderr.write(f"preloaded {', '.join(modules)} in {time.monotonic() - began:.1f} s\n")
    sys.stderr.flush()
    connection.send(json.dumps({"ready": True}).encode())
    _serve(connection, box)


if __name__ == "__main__":
    main()
