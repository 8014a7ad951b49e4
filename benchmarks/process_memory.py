"""Memory of a process tree as PSS: pages shared by several processes are counted once, in equal parts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")
GROWTH = 1.01
"""Growth of the resident memory after which the PSS is read again."""
READ_SECONDS = 5.0
"""Seconds after which it is read without growth."""


def tree(root: int) -> list[int]:
    """Return the process and all its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The name, in parentheses, may contain blanks; the parent is the second field after it.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children[int(fields[1])].append(int(folder.name))
    found, waiting = [], [root]
    while waiting:
        found.append(waiting[-1])
        waiting += children[waiting.pop()]
    return found


def pss_mib(process: int) -> float:
    """PSS of one process in MiB; 0 if it has ended."""
    try:
        for line in (PROC / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except (OSError, IndexError):
        return 0.0
    return 0.0


def resident_mib(process: int, *, peak: bool = False) -> float:
    """Resident memory of one process in MiB: now, or the largest since `reset_peak`."""
    field = "VmHWM" if peak else "VmRSS"
    lines = (PROC / str(process) / "status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def reset_peak(process: int) -> None:
    """Reset the peak memory that the kernel has recorded of a process."""
    (PROC / str(process) / "clear_refs").write_text("5")


def resident_pages(process: int) -> int:
    """Resident pages of one process; 0 if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        return int((PROC / str(process) / "statm").read_text().split()[1])
    return 0


class PeakMemory(threading.Thread):
    """Samples the PSS of a process tree until stopped; `peak` is the largest sum in MiB.

    The kernel takes some milliseconds of a core for the PSS of a process, which would slow down a measured run of many
    processes. So the PSS is read when the resident memory of all processes is larger than at any sample before, and
    every `READ_SECONDS`, as pages that a process no longer shares count more for the others.
    """

    def __init__(self, root: int, seconds: float = 0.5) -> None:
        super().__init__(name="memory", daemon=True)
        self.peak = 0.0
        self.processes = 0
        self._root, self._seconds = root, seconds
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Sample until stopped."""
        largest, read = 0.0, -READ_SECONDS
        while not self._stop_asked.wait(self._seconds):
            members, now = tree(self._root), time.monotonic()
            resident = sum(map(resident_pages, members))
            if resident <= largest * GROWTH and now - read < READ_SECONDS:
                continue
            largest, read = max(largest, resident), now
            total = sum(pss_mib(process) for process in members)
            if total > self.peak:
                self.peak, self.processes = total, len(members)

    def stop(self) -> None:
        """Stop sampling; `peak` is final afterwards."""
        self._stop_asked.set()
        self.join()
