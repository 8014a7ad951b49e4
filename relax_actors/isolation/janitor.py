"""Janitor: kills what is left of a process tree, however its root ends.

It knows the processes of the tree by a mark in an environment variable that they inherit, and remembers all descendants
of the root that it saw: a daemon may have cleared its environment. A daemon that did so less than `MAX_SCAN_SECONDS`
before the root was killed escapes.

It waits for the end of a pipe whose only write end is the root's. It runs in its own session and without environment,
so that what ends the root does not end it, and imports next to nothing, since it starts often. The janitor of an outer
tree waits for the janitors within.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from relax_actors.isolation.proc import command, descendants, environment, processes

VARIABLE = "RELAX_TREE"
"""Environment variable with the marks of all trees that a process belongs to."""
SCAN_SECONDS, MAX_SCAN_SECONDS, SCAN_SHARE = 0.25, 1.0, 100
"""Seconds between two scans, at first and later; longer where a scan takes more than a hundredth of them."""
END_SECONDS, INNER_SECONDS = 10.0, 9.0
"""Time for all to end, and for the janitors within the tree to finish before they are killed, too."""
CLEAN_SCANS = 3
"""Scans in a row that must find nothing: a process that forks may escape one."""
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 where shared memory lies
_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_CODE = f"import sys; sys.path.append({_FOLDER!r}); from relax_actors.isolation.janitor import main; main()"
COMMAND = (sys.executable, "-I", "-S", "-c", _CODE)
"""Start of its command line; `main` describes what follows."""


class Janitor:
    """A running janitor of this process's children, tied to it by a pipe.

    It removes `folder`, if given, and the shared-memory segments that a process of the tree has used, by the beginnings
    of their names.
    """

    def __init__(self, folder: str = "", shared_memory: Sequence[str] = ()) -> None:
        read, self._alive = os.pipe2(os.O_CLOEXEC)
        self._mark = f"{os.getpid()}-{os.urandom(8).hex()}"
        arguments = [*COMMAND, str(read), str(os.getpid()), self._mark, folder, *shared_memory]
        self._process = subprocess.Popen(  # noqa: S603
            arguments, pass_fds=(read,), stdin=subprocess.DEVNULL, start_new_session=True, env={}
        )
        os.close(read)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the processes of the tree."""
        return {VARIABLE: f"{os.environ.get(VARIABLE, '')} {self._mark}"}

    def is_foreign(self, pid: int) -> bool:
        """Whether a child of this process does not belong to the tree: its environment has no mark.

        The environment of a process that is about to end is empty, as is that of a daemon that cleared it.
        """
        variables = environment(pid)
        return pid == self._process.pid or (any(variables) and not is_marked(variables, self._mark))

    def close(self) -> None:
        """Kill what is left of the tree, and wait until it is gone."""
        os.close(self._alive)
        self._process.wait()


def is_janitor(pid: int) -> bool:
    """Whether a process is a janitor, which outlives the process that started it."""
    return command(pid)[1 : len(COMMAND)] == [word.encode() for word in COMMAND[1:]]


def is_marked(variables: list[bytes], mark: str) -> bool:
    """Whether an environment has a mark."""
    return any(words.startswith(f"{VARIABLE}=".encode()) and mark.encode() in words for words in variables)


class Tree:
    """The processes of a tree."""

    def __init__(self, root: int, mark: str) -> None:
        self._root, self._mark = root, mark
        self._known: dict[int, int] = {}
        """Start times of the descendants of the root: an id may come to another process."""

    def look(self) -> set[int]:
        """Note the descendants of the root; return those that still run."""
        table = processes()
        # The root's own children may be those of its terminal or of a monitor; all below the marked ones are the tree.
        own = {pid for pid, process in table.items() if process.parent == self._root and self._has_mark(pid)}
        kept = {pid for pid, start in self._known.items() if pid in table and table[pid].start == start}
        self._known = {pid: table[pid].start for pid in descendants(own, table) | kept}
        return set(self._known)

    def left(self) -> set[int]:
        """Return the processes of the tree that still run, whatever their parents are now."""
        table = {pid: process for pid, process in processes().items() if process.state != "Z"}
        left = {pid for pid, process in table.items() if self._known.get(pid) == process.start or self._has_mark(pid)}
        return descendants(left, table)

    def _has_mark(self, pid: int) -> bool:
        return is_marked(environment(pid), self._mark)


def segments(pids: Iterable[int], beginnings: tuple[str, ...]) -> set[str]:
    """Find the shared-memory segments that processes use, by the beginnings of their names."""
    if not beginnings:
        return set()
    kept = {entry.inode(): entry.path for entry in os.scandir(SHARED_MEMORY) if entry.name.startswith(beginnings)}
    used: set[str | None] = set()
    for pid in pids:
        try:
            used.update(os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd"))
            with open(f"/proc/{pid}/maps") as file:
                # A semaphore is mapped under a name that no longer exists, so compare inode numbers.
                used.update(kept.get(int(line.split(None, 5)[4])) for line in file if SHARED_MEMORY in line)
        except OSError:
            continue
    return {path for path in kept.values() if path in used}


def main() -> None:
    """Wait for the root's end, then kill what is left.

    The arguments are the read end of the pipe, the root, the mark, the folder, and the beginnings of segments.
    """
    pipe, tree, folder = int(sys.argv[1]), Tree(int(sys.argv[2]), sys.argv[3]), sys.argv[4]
    beginnings = tuple(sys.argv[5:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shared: set[str] = set()
    pause, scan = 0.0, SCAN_SECONDS
    while not select.select([pipe], [], [], pause)[0]:
        began, alive = time.monotonic(), tree.look()
        # Segments that are created and leaked between two scans are missed.
        shared |= segments(alive, beginnings)
        pause, scan = max(scan, SCAN_SHARE * (time.monotonic() - began)), min(MAX_SCAN_SECONDS, 1.1 * scan)
    shared |= segments(tree.left(), beginnings)
    began, clean = time.monotonic(), 0
    while clean < CLEAN_SCANS and (seconds := time.monotonic() - began) < END_SECONDS:
        left = tree.left()
        clean = 0 if left else clean + 1
        for pid in left:
            try:
                if seconds > INNER_SECONDS or not is_janitor(pid):
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.01)
    for path in shared:
        try:
            os.unlink(path)
        except OSError:
            continue
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
