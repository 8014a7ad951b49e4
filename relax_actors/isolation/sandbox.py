"""Run a model's code in a sandbox of bubblewrap, with limits and bounded output.

The sandbox has no network, no file of this machine but the system's, read-only, and an empty /tmp. If this process is
root, it starts the sandbox as a user without a name, since root has no limit of processes. Where a control group can be
created, it bounds the memory of all processes and of /tmp together.
"""

from __future__ import annotations

import itertools
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from broker.process import kill_group
from relax_actors.errors import ConfigError
from relax_actors.isolation import seccomp
from relax_actors.isolation.bubblewrap import SYSTEM, empty_folder, find_program, isolated, problem, system_files
from relax_actors.isolation.control_group import PREFIX, ControlGroup, bounds_memory, control_group

Kind = Literal["bubblewrap", "container", "none"]
FIRST_USER, USERS = 1 << 20, 1 << 20
"""Range of user ids for sandboxes that root starts. Each process has its own, so that they do not share limits."""
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "alternatives")
_CHUNK = 1 << 16
_TMP = "/tmp"  # noqa: S108 the sandbox's own
SYSTEM_PATH = "/usr/bin:/bin"
_SERIAL = itertools.count(1)
_CHECK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program.

    Attributes:
        seconds: wall clock.
        cpu_seconds: CPU time of a process; None for `seconds`.
        memory_mib: address space of each process, size of /tmp, and memory of all that together where a control group
            can be created.
        processes: processes and threads.
        file_mib: largest file.
        output: bytes of output that are kept; a program that writes more is killed.
    """

    seconds: float = 10.0
    cpu_seconds: int | None = None
    memory_mib: int = 512
    processes: int = 16
    file_mib: int = 16
    output: int = 64 << 10


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a program.

    Attributes:
        output: what it wrote to standard output and standard error, as text.
        problem: why it ended, for the model; empty if it ended with exit code 0.
    """

    output: str
    problem: str = ""


def check_bubblewrap(setting: str = "environment.options.sandbox") -> None:
    """Check that bubblewrap runs Python here; raises ConfigError."""
    try:
        find_program("bwrap", "bubblewrap")
        why = problem(_as_nobody())
        if not why:
            ended = run_program(python_command(), "print(1)", Limits(seconds=_CHECK_SECONDS))
            why = "" if ended.output == "1\n" else _no_python(ended)
    except ConfigError as error:
        why = str(error)
    if why:
        msg = f'{setting} = "bubblewrap": {why}; or write {setting} = "none" if the code may do all that this user may'
        raise ConfigError(msg)


def run_program(
    command: Sequence[str],
    text: str,
    limits: Limits,
    kind: Literal["bubblewrap", "none"] = "bubblewrap",
    stderr: int = subprocess.STDOUT,
) -> Ended:
    """Run a program in the sandbox with a text as input; return how it ended.

    `kind = "none"` applies the limits without a sandbox. `stderr` is as of Popen; by default a part of the output.

    Raises:
        ConfigError: a program that creates the sandbox is not installed.
    """
    pipe = subprocess.PIPE
    with started(command, limits, kind, stdin=pipe, stdout=pipe, stderr=stderr) as (process, group):
        try:
            output, stopped = communicate(process, text.encode(errors="replace"), limits)
        finally:
            kill_group(process.pid)
            code = process.wait()
        if code and group and group.ran_out_of_memory():
            stopped = f"it used more than {limits.memory_mib} MiB of memory"
    return Ended(output.decode(errors="replace"), stopped or describe(code, limits))


@contextmanager
def started(
    command: Sequence[str],
    limits: Limits,
    kind: Literal["bubblewrap", "none"] = "bubblewrap",
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.STDOUT,
    pass_fds: Sequence[int] = (),
) -> Iterator[tuple[subprocess.Popen[bytes], ControlGroup | None]]:
    """Start a program, and kill it and all that it started at the end.

    Args:
        command: the program and its arguments, by their paths in the sandbox.
        limits: its limits. The caller keeps those of the wall clock and of the output.
        kind: "none" applies the limits without a sandbox.
        stdin: standard input, as Popen takes it.
        stdout: standard output.
        stderr: error output.
        pass_fds: descriptors that the program inherits.

    Yields:
        The process, and the control group with the limit of its memory, if there is one.

    Raises:
        ConfigError: a program that creates the sandbox is not installed.
    """
    environment = {"PATH": "/usr/bin:/bin", "HOME": _TMP, "LANG": "C.UTF-8"}
    resources = limits_of(limits)
    # Set in the sandbox, since its user namespace counts its own processes; outside, all those of this user count.
    processes = {"nproc": resources.pop("nproc")}
    with ExitStack() as stack:
        group = stack.enter_context(_memory_limit(limits))
        sandbox, inherited = stack.enter_context(_bubblewrap(limits)) if kind == "bubblewrap" else ([], ())
        process = stack.enter_context(
            subprocess.Popen(  # noqa: S603 running code is what this is for
                [
                    *(group.enter if group else ()),
                    *_limited(find_program("prlimit", "util-linux"), resources),
                    *sandbox,
                    *_limited("prlimit", processes),
                    *command,
                ],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=_TMP,
                env=environment,
                start_new_session=True,
                pass_fds=[*inherited, *pass_fds],
            )
        )
        try:
            yield process, group
        finally:
            if process.returncode is None:  # its number is not given to another process
                kill_group(process.pid)


def python_command() -> list[str]:
    """Return the command of a Python that a sandbox can see, without installed packages."""
    system = shutil.which("python3", path=SYSTEM_PATH)
    return [system or str(Path(sys.executable).resolve()), "-I", "-S", "-"]


def _no_python(ended: Ended) -> str:
    said = ended.output.strip().splitlines()[-1:] or [ended.problem]
    return (
        f"{python_command()[0]} does not run in the sandbox ({said[0]}); install python3 in /usr (apt install python3)"
    )


@contextmanager
def _memory_limit(limits: Limits) -> Iterator[ControlGroup | None]:
    """Yield the limit of all memory; None where none can be set."""
    if not bounds_memory():
        yield None
        return
    with control_group(f"{PREFIX}{os.getpid()}.{next(_SERIAL)}", {"memory": limits.memory_mib << 20}) as group:
        yield group


def _as_nobody() -> tuple[str, ...]:
    if os.geteuid() != 0:
        return ()
    setpriv, user = find_program("setpriv", "util-linux"), str(FIRST_USER + os.getpid() % USERS)
    return (setpriv, "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs", "--inh-caps=-all", "--")


@contextmanager
def _bubblewrap(limits: Limits) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Yield a sandboxed command line, and the descriptors that it inherits."""
    tmp = [*empty_folder(_TMP, limits.memory_mib << 20), "--chdir", _TMP]
    places = ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", *tmp, "--remount-ro", "/"]
    # Buffers of loopback connections are megabytes that belong to no process.
    with isolated(seccomp.UNIX) as (bwrap, descriptor):
        yield [*_as_nobody(), *bwrap, *system_files(_ETC), *_own_python(), *places, "--"], (descriptor,)


def _own_python() -> list[str]:
    """Return bwrap's arguments for this Python, unless it is the system's."""
    folder = Path(python_command()[0]).parent.parent
    return [] if any(folder.is_relative_to(path) for path in SYSTEM) else ["--ro-bind", str(folder), str(folder)]


def limits_of(limits: Limits) -> dict[str, int]:
    """Return resource limits by the names of prlimit."""
    return {
        "cpu": limits.cpu_seconds or max(1, int(limits.seconds)),
        "as": limits.memory_mib << 20,
        "fsize": limits.file_mib << 20,
        "nproc": limits.processes,
        "nofile": 64,
        "core": 0,
    }


def _limited(prlimit: str, resources: Mapping[str, int]) -> list[str]:
    """Return the start of a command line that sets the limits of a command."""
    return [prlimit, *(f"--{name}={value}" for name, value in resources.items()), "--"]


def communicate(
    process: subprocess.Popen[bytes], text: bytes, limits: Limits, *, keep_input: bool = False
) -> tuple[bytes, str]:
    """Write the input and read the output; return it, and why the program must be stopped.

    `limits` are wall clock and bytes of output; with `keep_input`, standard input stays open behind the text.
    """
    assert process.stdin is not None  # noqa: S101 as given to Popen
    assert process.stdout is not None  # noqa: S101
    deadline, output, sent = time.monotonic() + limits.seconds, bytearray(), 0
    for pipe in (process.stdin, process.stdout):
        os.set_blocking(pipe.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is process.stdin:
                    sent = _send(process.stdin.fileno(), text, sent)
                    if sent >= len(text):
                        selector.unregister(process.stdin)
                        if not keep_input:
                            with suppress(BrokenPipeError):
                                process.stdin.close()
                    continue
                data = os.read(process.stdout.fileno(), _CHUNK)
                if not data:
                    return bytes(output), _wait(process, deadline, limits)
                output += data
                if len(output) > limits.output:
                    return bytes(output[: limits.output]), f"it wrote more than {limits.output} bytes and was stopped"
    return bytes(output), timeout_text(limits)


def _wait(process: subprocess.Popen[bytes], deadline: float, limits: Limits) -> str:
    """Wait for the end of a program that closed its output."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return timeout_text(limits)
    return ""


def timeout_text(limits: Limits) -> str:
    """Describe the end of a program by its wall clock."""
    return f"it took longer than {limits.seconds:g} seconds and was stopped"


def _send(descriptor: int, text: bytes, sent: int) -> int:
    try:
        return sent + os.write(descriptor, text[sent : sent + _CHUNK])
    except BrokenPipeError:
        return len(text)


def describe(code: int, limits: Limits) -> str:
    """Describe an exit code; bwrap and setpriv report a signal as 128 and its number."""
    number = -code if code < 0 else code - 128
    if number == signal.SIGXCPU:
        return f"it used more than {limits.cpu_seconds or max(1, int(limits.seconds))} seconds of CPU"
    if number in signal.valid_signals():
        return f"it was killed by {signal.Signals(number).name}" if number else f"it ended with exit code {code}"
    return f"it ended with exit code {code}" if code else ""
