"""The processes of this machine, as /proc shows them.

psutil reads the same files. It would be a dependency of a janitor that imports next to nothing.
"""

from __future__ import annotations

import os
from typing import NamedTuple

MIB = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")
"""Clock ticks a second."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    """A process at one moment.

    Attributes:
        state: `Z` for a zombie, `T` or `t` if it is stopped by a signal.
        parent: id of its parent.
        group: id of its process group.
        session: id of its session.
        start: clock ticks since boot at its start; with the id it names a process for good.
        cpu: seconds of CPU time, of the children that it has waited for, too.
        memory: resident bytes.
    """

    state: str
    parent: int
    group: int
    session: int
    start: int
    cpu: float
    memory: int


def process(pid: int | str = "self") -> Process | None:
    """Return a process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    parent, group, session = map(int, fields[1:4])
    cpu = sum(map(int, fields[11:15])) / TICKS
    return Process(fields[0].decode(), parent, group, session, int(fields[19]), cpu, int(fields[21]) * _PAGE)


def processes() -> dict[int, Process]:
    """Return all processes by id, zombies included."""
    states = ((int(name), process(name)) for name in os.listdir("/proc") if name.isdigit())
    return {pid: state for pid, state in states if state is not None}


def children() -> dict[int, Process]:
    """Return the children of this process by id, zombies included."""
    try:
        pids = [int(pid) for task in os.listdir("/proc/self/task") for pid in _children_of(task)]
    except OSError:  # a kernel without these lists, or a thread that has just ended
        own = os.getpid()
        return {pid: state for pid, state in processes().items() if state.parent == own}
    states = ((pid, process(pid)) for pid in pids)
    return {pid: state for pid, state in states if state is not None}


def _children_of(task: str) -> list[bytes]:
    with open(f"/proc/self/task/{task}/children", "rb") as file:
        return file.read().split()


def descendants(roots: set[int], table: dict[int, Process]) -> set[int]:
    """Return processes of a table and all their descendants."""
    by_parent: dict[int, list[int]] = {}
    for pid, state in table.items():
        by_parent.setdefault(state.parent, []).append(pid)
    below, new = set(roots), list(roots)
    while new:
        new = [child for pid in new for child in by_parent.get(pid, []) if child not in below]
        below.update(new)
    return below


def environment(pid: int) -> list[bytes]:
    """Return a process's environment at its start; empty if unreadable."""
    return _words(f"/proc/{pid}/environ")


def command(pid: int) -> list[bytes]:
    """Return the command line of a process; empty if it has ended."""
    return _words(f"/proc/{pid}/cmdline")


def _words(path: str) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            return file.read().removesuffix(b"\0").split(b"\0")
    except OSError:
        return []
