"""Child processes that die with their parent.

A small launcher asks the kernel to kill the child when the thread that started it ends (`PR_SET_PDEATHSIG`), then
executes the command. Start children only from a thread that lives as long as they should. A child adopts its
descendants whose parents end.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

_LAUNCHER = """\
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
if os.getppid() != int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
os.execv(sys.argv[2], sys.argv[2:])
"""


def spawn(
    command: list[str],
    *,
    log: IO[bytes] | int = subprocess.DEVNULL,
    environment: dict[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
    cwd: Path | None = None,
    session: bool = True,
    hold_stop: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `command`; the kernel kills it when the calling thread ends.

    Args:
        command: absolute path of the program and its arguments; no shell.
        log: receives stdout and stderr.
        environment: the complete environment; None inherits this process's.
        pass_fds: file descriptors that the child inherits.
        cwd: working directory of the child.
        session: start a new session and process group, or stay in this process's.
        hold_stop: start with SIGTERM blocked, so that a stop during the start is not lost: the child unblocks it once
            it has a handler.
    """
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if hold_stop else ())
    try:
        return subprocess.Popen(  # noqa: S603
            launcher,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log != subprocess.DEVNULL else subprocess.DEVNULL,
            env=environment,
            pass_fds=pass_fds,
            start_new_session=session,
            cwd=cwd,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def kill_group(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the process group that `pid` leads; do nothing if the group is gone."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def stop(process: subprocess.Popen[bytes], grace: float) -> None:
    """Stop a spawned process: SIGTERM, then SIGKILL to its group after `grace` seconds."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.terminate()
        _wait(process, grace)
    kill_group(process.pid)
    process.wait()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end of a process, and see it at once: `Popen.wait` looks every 50 ms."""
    descriptor = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
    finally:
        os.close(descriptor)
