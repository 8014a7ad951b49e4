"""Control groups that bound the processes and the memory of a whole sandbox.

Limits of processes (RLIMIT_NPROC) do not bind root, and limits of memory (RLIMIT_AS) bind each process alone and no
memory of the kernel. A control group binds both. It needs the controllers `pids` and `memory`, in a group that this
process may extend: root has one on most machines, and in a container whose engine mounts it writable; another user has
one below a service of systemd with delegation.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from relax_actors.errors import ConfigError

MONITORS = 1
"""Processes of bubblewrap itself in the group: the one that waits for the sandbox."""
PREFIX = "relax-"
REMOVE_SECONDS = 2.0
_PAUSE = 0.005
_ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 1; shift; done; shift; exec "$@"'
_FILES = {"pids": ("pids.max", "pids.max"), "memory": ("memory.max", "memory.limit_in_bytes")}
"""File with the limit of a controller, in version 2 and 1 of control groups."""
_EVENTS = ("memory.events", "memory.oom_control")
_OWNER = re.compile(rf"{PREFIX}(\d+)\.\d+")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Limits of a sandbox.

    Attributes:
        enter: start of a command line that runs a command within the limits.
        folders: folders of the groups.
    """

    enter: tuple[str, ...]
    folders: tuple[Path, ...]

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed a process because of the limit of memory."""
        for path in (folder / name for folder in self.folders for name in _EVENTS):
            with suppress(OSError):
                if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                    return int(match[1]) > 0
        return False


def parents(controller: str) -> list[Path]:
    """Return groups in which this process might create one, by the kernel's report."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path.lstrip("/")
    groups = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options = line.split(" ")[:4]
        if kind == "cgroup" and controller in options.split(","):
            group = next((path for names, path in own.items() if controller in names.split(",")), "")
            groups.append(Path(folder, group))
        elif kind == "cgroup2":
            # A group with processes cannot pass controllers on, but its parent may.
            group_ = Path(folder, own.get("", ""))
            groups += [group_, group_.parent] if own.get("") else [group_]
    return groups


@contextmanager
def control_group(name: str, limits: Mapping[str, int]) -> Iterator[ControlGroup]:
    """Create a control group for the block; reuse one that a crash left.

    The limits are `pids`, number of processes and threads of the sandbox, and `memory`, bytes of all that it holds.

    Raises:
        ConfigError: no group with one of the limits can be created.
    """
    with ExitStack() as stack:
        folders: list[Path] = []
        for controller, limit in limits.items():
            folder = _create(name, controller, limit + (MONITORS if controller == "pids" else 0))
            if folder not in folders:
                folders.append(folder)
                stack.callback(_remove, folder)
        files = [str(folder / "cgroup.procs") for folder in folders]
        yield ControlGroup(("/bin/sh", "-c", _ENTER, "enter", *files, "--"), tuple(folders))


def actor_name(actor: str) -> str:
    """Return the name of an actor's group: the same after a crash."""
    return f"{PREFIX}{hashlib.sha256(actor.encode()).hexdigest()[:24]}"


def problem(controller: str) -> str:
    """Return why no group with a limit can be created here; empty if one can."""
    try:
        with control_group(f"{PREFIX}{os.getpid()}.0", {controller: 1 << 20}):
            return ""
    except ConfigError as error:
        return str(error)


@functools.cache
def bounds_memory() -> bool:
    """Whether this process can limit the memory of a sandbox as a whole."""
    return not problem("memory")


def remove_leftovers() -> None:
    """Remove groups of killed processes; names hold the process ids."""
    for parent in parents("memory"):
        for path in parent.glob(f"{PREFIX}*.*"):
            owner = _OWNER.fullmatch(path.name)
            if owner and not Path("/proc", owner[1]).exists():
                with suppress(OSError):
                    path.rmdir()


def _create(name: str, controller: str, limit: int) -> Path:
    reasons = []
    for parent in parents(controller):
        folder = parent / name
        try:
            folder.mkdir(exist_ok=True)
            _limit(folder, controller, limit)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            with suppress(OSError):
                folder.rmdir()
        else:
            return folder
    why = "; ".join(reasons) or "none is mounted"
    msg = f"no control group with the controller {controller} can be created ({why})"
    raise ConfigError(msg)


def _limit(folder: Path, controller: str, limit: int) -> None:
    newer, older = _FILES[controller]
    file = folder / newer
    # The files of a control group cannot be created.
    (file if file.exists() else folder / older).write_text(str(limit))
    if controller == "memory":
        # No swap beside it; these files are there only if swap is counted.
        for name, value in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", limit)):
            with suppress(OSError):
                (folder / name).write_text(str(value))


def _remove(folder: Path) -> None:
    """Remove a group once its processes are gone; others may be in it."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while time.monotonic() < deadline:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(_PAUSE)
        else:
            return
