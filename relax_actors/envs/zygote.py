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
from typing import Any

import msgpack

from relax_actors.config.environment import EnvironmentSection
from relax_actors.envs.loading import load_environment
from relax_actors.envs.session import Template, serve
from relax_actors.errors import ConfigError

LENGTH = struct.Struct("!I")
FORK, REAP = "fork", "reap"
_PR_SET_PDEATHSIG = 1
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
        template = Template(cls, values, section.max_observation_bytes, reusable)
    except ConfigError as error:
        send(control, str(error))
        return
    send(control, "")
    gc.collect()
    gc.freeze()
    while (received := receive(control)) is not None:
        (command, *arguments), descriptors = received
        if command == FORK:
            send(control, _fork(control, template, descriptors[0], *arguments))
        else:
            send(control, os.waitstatus_to_exitcode(os.waitpid(arguments[0], 0)[1]))


if __name__ == "__main__":
    main()
