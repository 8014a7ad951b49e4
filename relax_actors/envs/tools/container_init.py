"""Process 1 of a container: runs a program with limits, and reports its end.

    python3 -I -S -c <this file> '{"seconds": 10, "limits": {"RLIMIT_CPU": 10}, "command": ["python3"], ...}'

It runs with the Python of the container's image (3.9 or newer) and imports its standard library alone. Its standard
input is the length of a text, a newline, the text, and then nothing until the caller ends or dies; the text is the
program's standard input. The report, `{"code": 0}` with a negative number for a signal and null for the wall clock, is
written to standard error, which the program does not have: its own goes to standard output.

Invariant: when this process ends, the kernel kills all others of the container. They cannot kill, stop or trace it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

PR_SET_DUMPABLE = 4


def read_text() -> int:
    """Return a descriptor of a file in memory with the text from standard input."""
    with open(0, "rb", closefd=False, buffering=0) as stream:
        left = int(stream.readline())
        text = os.memfd_create("stdin")
        while left:
            data = stream.read(min(left, 1 << 16))
            if not data:
                os._exit(1)
            left -= len(data)
            os.write(text, data)
    os.lseek(text, 0, os.SEEK_SET)
    return text


def become(given: dict[str, Any], text: int) -> None:
    """Become the program."""
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.setsid()
        os.dup2(text, 0)
        for name, value in given["limits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        os.execvpe(given["command"][0], given["command"], given["environment"])  # noqa: S606
    except BaseException as error:  # noqa: BLE001 the process ends here
        os.write(1, f"{error}\n".encode())
    finally:
        os._exit(127)


def end_with_input() -> None:
    """End the container when the caller closes standard input or dies."""
    os.read(0, 1)
    os._exit(1)


def wait(program: int, seconds: float) -> int | None:
    """Return the exit code of the program; None if its time is over."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def main() -> None:
    """Run the program of the command line."""
    given = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # the program has the same user; now it can neither trace nor read this
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    report = os.dup(2)
    os.dup2(1, 2)
    text = read_text()
    program = os.fork()
    if program == 0:
        become(given, text)
    threading.Thread(target=end_with_input, daemon=True).start()
    os.write(report, json.dumps({"code": wait(program, given["seconds"])}).encode())
    os._exit(0)


main()
