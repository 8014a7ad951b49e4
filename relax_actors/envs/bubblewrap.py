"""What every sandbox of bubblewrap has in common: the system's files, read-only, and a test whether it works here."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf", "passwd", "group", "alternatives")
CERTIFICATES = ("ssl/openssl.cnf", "ssl/certs", "pki/tls/certs", "ca-certificates")
ISOLATED = ("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL")
"""No network, no other processes, no terminal, no capabilities."""


def system_files(etc: tuple[str, ...] = (*ETC, *CERTIFICATES)) -> Iterator[str]:
    """Yield the arguments of bwrap that show the system's files."""
    for path in map(Path, SYSTEM):
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))  # noqa: PTH115
        elif path.exists():
            yield from ("--ro-bind", str(path), str(path))
    for path in (Path("/etc") / name for name in etc):
        yield from ("--ro-bind-try", str(path), str(path))


def problem(before: tuple[str, ...] = ()) -> str:
    """Return why no sandbox can be created here; empty if it can.

    Args:
        before: command that starts bwrap, e.g. as another user.
    """
    program = shutil.which("bwrap")
    if program is None:
        return "bwrap is not installed; install bubblewrap (apt install bubblewrap)"
    command = [*before, program, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return f"bwrap cannot create a sandbox ({said[0]}); allow user namespaces, which containers often forbid"
    return ""
