"""Process that has imported the environment's class and forks a process for each session.

Started by an actor as `python -m relax_actors.envs.zygote <descriptor>` with a socket, on which it reads requests
`[command, ...]` and answers each. It has one thread, so that forking is safe. A forked process that has ended is reaped
on request only: until then its id names no other process, and its group can be killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from relax_actors.config.environment import EnvironmentSection
from relax_actors.envs.loading import load_environment
from relax_actors.envs.session import Template, serve
from relax_actors.errors import ConfigError

LENGTH = struct.Struct("!I")
FORK, REAP = "fork", "reap"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ROUNDS = 100
"""How often the processes that a session has left behind are looked for: killing one may reveal its children."""
_MAX_DESCRIPTORS = 1


def receive(sock: socket.socket) -> tuple[list[Any], list[int]] | None:
    """Receive a message `[command, ...]` with at most one descriptor; None if the other side has ended."""
    head, descriptors, _, _ = socket.recv_fds(sock, LENGTH.size, _MAX_DESCRIPTORS)
    while head and len(head) < LENGTH.size:
        head += sock.recv(LENGTH.size - len(head))
    if not head:
        return None
    (size,) = LENGTH.unpack(head)
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return None
        data += more
    return msgpack.unpackb(data), descriptors


def send(sock: socket.socket, *message: Any, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message."""
    data = msgpack.packb(message)
    socket.send_fds(sock, [LENGTH.pack(len(data))], descriptors)
    sock.sendall(data)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_descendants() -> None:
    """Become the parent of descendants whose own parent ends, those that left the process group included."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _reap(pid: int, alive: set[int]) -> int:
    """Wait for a session's process that has ended, and kill what it left behind; return its exit code."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    alive.discard(pid)
    for _ in range(_ROUNDS):
        try:
            found = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
        except OSError:  # a kernel without this list
            break
        left = {int(child) for child in found} - alive
        if not left:
            break
        for child in left:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return code


def _fork(control: socket.socket, template: Template, descriptor: int, cpu_seconds: int | None) -> int:
    """Fork the process of a session; return its id."""
    if pid := os.fork():
        os.close(descriptor)
        return pid
    code = 1
    try:
        parent = os.getppid()
        die_with_parent()
        if os.getppid() == parent:
            os.setsid()
            adopt_descendants()
            control.close()
            if cpu_seconds is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
            asyncio.run(serve(template, socket.socket(fileno=descriptor)))
            code = 0
    except BaseException:  # noqa: BLE001 the process ends here
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Import the class, then fork sessions until the actor ends."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the actor decides
    control = socket.socket(fileno=int(sys.argv[1]))
    received = receive(control)
    if received is None:
        return
    (body, path), _ = received
    sys.path[:] = path
    section = EnvironmentSection.model_validate(body)
    try:
        cls, values = load_environment(section)
        reusable = cls.shares_process and section.cpu_seconds is None
        template = Template(cls, values, section.max_observation_bytes, section.players, reusable)
        cls.clean_up(values)
    except ConfigError as error:
        send(control, str(error))
        return
    send(control, "")
    gc.collect()
    gc.freeze()
    adopt_descendants()
    alive: set[int] = set()
    while (received := receive(control)) is not None:
        (command, *arguments), descriptors = received
        if command == FORK:
            alive.add(pid := _fork(control, template, descriptors[0], *arguments))
            send(control, pid)
        else:
            send(control, _reap(arguments[0], alive))
    for pid in alive:
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    cls.clean_up(values)


if __name__ == "__main__":
    main()
