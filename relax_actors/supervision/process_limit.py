"""Control group that bounds how many processes and threads a sandbox has.

The limit RLIMIT_NPROC does not bind root, a control group does. It needs the controller `pids`, in a group that this
process may extend: root has one on most machines, and in a container whose engine mounts it writable.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from relax_actors.errors import ConfigError

MONITORS = 1
"""Processes of bubblewrap itself in the group: the one that waits for the sandbox."""
_ENTER = 'echo 0 > "$0" && exec "$@"'


def parents() -> list[Path]:
    """Return the groups in which this process might create one, by the mounts and groups that the kernel reports."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path.lstrip("/")
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options = line.split(" ")[:4]
        if kind == "cgroup" and "pids" in options.split(","):
            group = next((path for names, path in own.items() if "pids" in names.split(",")), "")
            found.append(Path(folder, group))
        elif kind == "cgroup2":
            # A group with processes cannot pass controllers on, but its parent may.
            group_ = Path(folder, own.get("", ""))
            found += [group_, group_.parent] if own.get("") else [group_]
    return found


@contextmanager
def process_limit(actor: str, most: int) -> Iterator[list[str]]:
    """Create the group of an actor and yield the start of a command line that runs a command in it.

    Args:
        actor: unique name of the actor on this machine; its group is used again after a crash.
        most: number of processes and threads.

    Raises:
        ConfigError: no group with a limit can be created.
    """
    name, reasons = f"relax-{hashlib.sha256(actor.encode()).hexdigest()[:24]}", []
    for parent in parents():
        group = parent / name
        try:
            group.mkdir(exist_ok=True)
            (group / "pids.max").write_text(str(most + MONITORS))
        except OSError as error:
            reasons.append(f"{group}: {error.strerror}")
            with suppress(OSError):
                group.rmdir()
            continue
        try:
            yield ["/bin/sh", "-c", _ENTER, str(group / "cgroup.procs")]
        finally:
            with suppress(OSError):  # another incarnation of the actor has processes in it
                group.rmdir()
        return
    msg = f"no control group with the controller pids can be created ({'; '.join(reasons) or 'none is mounted'})"
    raise ConfigError(msg)


def problem() -> str:
    """Why no limit of processes would bind this user; empty if one does."""
    if os.geteuid() != 0:
        return ""
    try:
        with process_limit(f"check {os.getpid()}", 1):
            return ""
    except ConfigError as error:
        return str(error)
