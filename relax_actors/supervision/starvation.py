"""How long a process has waited for the processor or the disk, so that a loaded machine is told from a dead process."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_WAITS = ("R", "D")
"""States of a thread that runs or waits for its turn, or for the disk."""


class _Times(NamedTuple):
    """Seconds that a thread has run, and waited for the processor, so far."""

    ran: float
    waited: float


class Starvation:
    """Measures one process. The kernel adds a wait when it ends; threads that still wait are found by their state."""

    def __init__(self) -> None:
        self._pid, self._at = 0, time.monotonic()
        self._before: dict[str, _Times] = {}

    def measure(self, pid: int) -> float:
        """Return for how many seconds since the last call a thread of the process has waited.

        A thread that is stopped, or sleeps until something happens, does not wait; nor does one that runs all the time.
        0 in the first call for a process.
        """
        now, before = time.monotonic(), self._before if pid == self._pid else {}
        passed, waited = now - self._at, 0.0
        self._pid, self._at, self._before = pid, now, {}
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError, ValueError):  # the thread has ended
                    ran, delayed, _ = (task / "schedstat").read_text().split()
                    times = self._before[task.name] = _Times(int(ran) / 1e9, int(delayed) / 1e9)
                    last = before.get(task.name)
                    if last is not None:
                        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                        own = passed - (times.ran - last.ran) if state in _WAITS else times.waited - last.waited
                        waited = max(waited, own)
        return min(waited, passed)
