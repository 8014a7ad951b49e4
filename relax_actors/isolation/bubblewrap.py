"""Common parts of bubblewrap's sandboxes, and a test whether they work here."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from relax_actors.errors import ConfigError
from relax_actors.isolation import seccomp

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf", "passwd", "group", "alternatives")
CERTIFICATES = ("ssl/openssl.cnf", "ssl/certs", "pki/tls/certs", "ca-certificates")
OLDEST = (0, 8)
"""First version that can forbid further user namespaces."""
_ISOLATED = ("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session")
_NO_CAPABILITIES = ("--cap-drop", "ALL")


def find_program(name: str, package: str) -> str:
    """Return the path of a program; raises ConfigError if it is not installed."""
    if (path := shutil.which(name)) is None:
        msg = f"{name} is not installed; install {package} (apt install {package})"
        raise ConfigError(msg)
    return os.path.abspath(path)  # noqa: PTH100 a link stays a link, as programs look at the name they are called by


@contextmanager
def isolated(families: Sequence[int] = seccomp.LOOPBACK) -> Iterator[tuple[list[str], int]]:
    """Yield the start of a command line of bwrap, and the descriptor that it must inherit.

    The sandbox has no network, no other processes, no terminal, no capabilities, sockets of the address `families`
    alone, and refuses the system calls of `seccomp`.

    Raises:
        ConfigError: bubblewrap is not installed, or the system calls of this machine are not known.
    """
    if (machine := seccomp.this_machine()) is None:
        known = " and ".join(seccomp.MACHINES)
        msg = f"the filter of system calls is there for {known}, and this machine is {platform.machine()}"
        raise ConfigError(msg)
    command = [find_program("bwrap", "bubblewrap"), *_ISOLATED, *_NO_CAPABILITIES]
    read, write = os.pipe()
    try:
        with os.fdopen(write, "wb") as file:
            file.write(seccomp.program(machine, families))  # smaller than the buffer of a pipe
        yield [*command, "--seccomp", str(read)], read
    finally:
        os.close(read)


def system_files(etc: tuple[str, ...] = (*ETC, *CERTIFICATES)) -> Iterator[str]:
    """Yield the arguments of bwrap that show the system's files."""
    for path in map(Path, SYSTEM):
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))  # noqa: PTH115
        elif path.exists():
            yield from ("--ro-bind", str(path), str(path))
    for path in (Path("/etc") / name for name in etc):
        yield from ("--ro-bind-try", str(path), str(path))


def empty_folder(path: str, size: int) -> Iterator[str]:
    """Yield the arguments of bwrap for an empty folder in memory of at most `size` bytes."""
    yield from ("--size", str(size), "--tmpfs", path)


def problem(before: tuple[str, ...] = ()) -> str:
    """Return why bwrap cannot create a sandbox here; empty if it can."""
    try:
        with isolated() as (command, descriptor):
            if (version := _version(command[0])) and version < OLDEST:
                own, least = (".".join(map(str, numbers)) for numbers in (version, OLDEST))
                return f"{command[0]} is bubblewrap {own}; install {least} or newer and put it first on the PATH"
            look = [*before, *command, "--ro-bind", "/", "/", "--proc", "/proc", "/bin/sh", "-c", ":"]
            done = subprocess.run(look, capture_output=True, text=True, check=False, pass_fds=[descriptor])  # noqa: S603
    except ConfigError as error:
        return str(error)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        remedy = "allow user namespaces, which containers often forbid, and so does another sandbox"
        return f"bwrap cannot create a sandbox ({said[0]}); {remedy}"
    return ""


def _version(program: str) -> tuple[int, ...]:
    """Return the version of bubblewrap; empty if it does not say."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    match = re.search(r"(\d+)\.(\d+)", done.stdout)
    return tuple(map(int, match.groups())) if match else ()
