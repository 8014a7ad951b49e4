"""Janitor of a process tree: kills what is left of it when its root ends, however the root ends.

It knows the processes of the tree by an environment variable that they inherit, and remembers all descendants of the
root that it saw: a daemon may have cleared its environment. A daemon that did so less than `SCAN_SECONDS` before the
root was killed escapes.

The janitor runs as a script, in its own session and without the variable: `python -I -S tree_janitor.py <descriptor>
<root> <mark>`. The descriptor is the read end of a pipe whose only write end is the root's.
"""

import os
import select
import signal
import subprocess
import sys
import time

VARIABLE = "RELAX_TREE"
SCAN_SECONDS, SCAN_SHARE = 1.0, 100
"""Seconds between two scans; longer where a scan takes more than a hundredth of it."""
END_SECONDS = 10.0
CLEAN_SCANS = 3
"""Scans in a row that must find nothing: a process that forks may escape one."""


class TreeJanitor:
    """A running janitor of this process's children.

    The mark is the value of `RELAX_TREE` in the environment of all processes of the tree.
    """

    def __init__(self) -> None:
        read, self._alive = os.pipe2(os.O_CLOEXEC)
        self._mark = f"{os.getpid()}-{os.urandom(8).hex()}"
        command = [sys.executable, "-I", "-S", __file__, str(read), str(os.getpid()), self._mark]
        self._process = subprocess.Popen(  # noqa: S603
            command, pass_fds=(read,), stdin=subprocess.DEVNULL, start_new_session=True, env={}
        )
        os.close(read)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the processes of the tree."""
        return {VARIABLE: self._mark}

    def is_foreign(self, pid: int) -> bool:
        """Whether a child of this process does not belong to the tree: its environment has no mark.

        The environment of a process that is about to end is empty, as is that of a daemon that cleared it.
        """
        environment = read_environment(pid)
        return pid == self._process.pid or (any(environment) and not is_in(environment, self._mark))

    def close(self) -> None:
        """Kill what is left of the tree, and wait until it is gone."""
        os.close(self._alive)
        self._process.wait()


def read_environment(pid: int) -> list[bytes]:
    """Return the environment with which a process was started; empty if it has ended or cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def is_in(environment: list[bytes], mark: str) -> bool:
    """Whether an environment has a mark."""
    return f"{VARIABLE}={mark}".encode() in environment


def processes() -> dict[int, tuple[int, int]]:
    """Return parent and start time of every process, by id; zombies are left out."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found[int(name)] = int(fields[1]), int(fields[19])
    return found


def descendants(roots: set[int], found: dict[int, tuple[int, int]]) -> set[int]:
    """Return the descendants of some processes, and these."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in found.items():
        children.setdefault(parent, []).append(pid)
    below, new = set(roots), list(roots)
    while new:
        new = [child for pid in new for child in children.get(pid, []) if child not in below]
        below.update(new)
    return below


def kill(pids: set[int]) -> None:
    """Kill processes; those that have ended are ignored."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


def main() -> None:
    """Wait for the root's end, then kill what is left."""
    pipe, root, mark = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    known: dict[int, int] = {}  # start times: an id may come to another process
    pause = 0.0
    while not select.select([pipe], [], [], pause)[0]:
        began, found = time.monotonic(), processes()
        # The root's own children may be those of its terminal or of a monitor; all below the marked ones are the tree.
        own = {pid for pid, (parent, _) in found.items() if parent == root and is_in(read_environment(pid), mark)}
        tree = descendants(own, found)
        kept = {pid for pid, start in known.items() if pid in found and found[pid][1] == start}
        known = {pid: found[pid][1] for pid in kept | tree}
        pause = max(SCAN_SECONDS, SCAN_SHARE * (time.monotonic() - began))
    end, clean = time.monotonic() + END_SECONDS, 0
    while clean < CLEAN_SCANS and time.monotonic() < end:
        found = processes()
        left = {pid for pid in found if known.get(pid) == found[pid][1] or is_in(read_environment(pid), mark)}
        left = descendants(left, found)
        clean = 0 if left else clean + 1
        kill(left)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
