"""How long a process has waited for the processor or the disk, so that a loaded machine is told from a dead process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_WAITS = ("R", "D")
"""States of a thread that runs or waits for its turn, or for the disk."""


class _Schedule(NamedTuple):
    """What the kernel has counted for a thread so far."""

    waited: float
    """Seconds that it waited for the processor."""
    turns: int
    """Number of times that it got the processor."""


class Starvation:
    """Measures one process.

    The kernel adds a wait when it ends. A thread that got no turn at all, and is not asleep, still waits.

    Args:
        proc: folder in which the kernel shows its processes.
        clock: returns the time in seconds.
    """

    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._clock = proc, clock
        self._pid, self._at = 0, clock()
        self._before: dict[str, _Schedule] = {}

    def measure(self, pid: int) -> float:
        """Return for how many seconds since the last call a thread of the process has waited.

        A thread that is stopped, or sleeps until something happens, does not wait; nor does one that runs all the time.
        A thread that waited for most of the time counts as if it had waited all the time: the rest is not enough to
        answer anybody. 0 in the first call for a process.
        """
        now, before = self._clock(), self._before if pid == self._pid else {}
        passed, waited = now - self._at, 0.0
        self._pid, self._at, self._before = pid, now, {}
        with suppress(OSError):
            for task in (self._proc / str(pid) / "task").iterdir():
                with suppress(OSError, ValueError):  # the thread has ended
                    _, delayed, turns = (task / "schedstat").read_text().split()
                    schedule = self._before[task.name] = _Schedule(int(delayed) / 1e9, int(turns))
                    if (last := before.get(task.name)) is None:
                        continue
                    state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                    still_waits = schedule.turns == last.turns and state in _WAITS
                    waited = max(waited, passed if still_waits else schedule.waited - last.waited)
        return passed if 2 * waited > passed else waited


def starved_with_this_process() -> Callable[[int], float]:
    """Return a function that measures a process, or this one if it has waited longer; see `Starvation.measure`."""
    other, own = Starvation(), Starvation()
    return lambda pid: max(other.measure(pid), own.measure(os.getpid()))
