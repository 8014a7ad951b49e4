"""Progress of a start: tells a child that loads slowly, e.g. on a busy machine, from one that hangs.

A start is ended when its deadline has passed and its processes have made no visible progress for a third of the
deadline. A process that waits in a loop may use CPU time forever, so `START_LIMIT` deadlines end every start.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from relax_actors.config.infrastructure import START_LIMIT

WINDOW, READINGS = 1 / 3, 4
"""Share of the start deadline in which a start must make progress, and readings in that time."""
BUSY = 0.05
"""Share of a core from which a start makes progress; processes that only poll stay below it."""
LOADED_BYTES = 16 << 20
"""Memory that a start must have added to make progress."""
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a child and its descendants have used: CPU seconds, resident memory and size of the log in bytes."""

    cpu: float
    memory: int
    log: int


class StartProgress:
    """Decides whether a start that takes too long is to be ended; times are seconds on the monotonic clock.

    Args:
        deadline: seconds after which a start without progress is ended.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline, self._window = deadline, deadline * WINDOW
        self._mark: Usage | None = None
        self._moved_at = self._read_at = self._held_until = float("-inf")

    def is_due(self, since: float, now: float) -> bool:
        """Whether to read the usage of a child that has been starting `since` then."""
        seconds = now - max(since, self._held_until)
        return seconds > self._deadline - self._window and now - self._read_at >= self._window / READINGS

    def observe(self, usage: Usage, now: float) -> None:
        """Record the usage of the child."""
        self._read_at = now
        if self._mark is None or self._has_moved(self._mark, usage):
            self._mark, self._moved_at = usage, now

    def hold(self, now: float) -> None:
        """Record that the child waits for another one, whose start is watched by itself; its own time begins anew."""
        self._held_until = now

    def lateness(self, since: float, resumed: float, now: float) -> str:
        """Return why a start is to be ended; empty if it goes on.

        Args:
            since: begin of the start.
            resumed: end of the last pause of the whole machine.
            now: the time.
        """
        seconds, idle = now - max(since, self._held_until), now - max(self._moved_at, resumed)
        remedy = "raise supervision.start_deadline if it needs longer"
        if seconds > START_LIMIT * self._deadline:
            return f"not ready within {seconds:.3g} s, {START_LIMIT} times supervision.start_deadline; {remedy}"
        if seconds <= self._deadline or self._mark is None or idle < self._window:
            return ""
        return (
            f"not ready within {seconds:.3g} s, and no progress for {idle:.3g} s (log, memory and CPU time of its "
            f"processes); {remedy}"
        )

    def _has_moved(self, before: Usage, after: Usage) -> bool:
        return (
            after.cpu - before.cpu >= BUSY * self._window
            or after.memory - before.memory >= LOADED_BYTES
            or after.log != before.log
        )


class ProcessUsage:
    """CPU time and memory of all processes of this machine at one moment."""

    def __init__(self, children: dict[int, list[int]], used: dict[int, tuple[float, int]]) -> None:
        self._children, self._used = children, used

    @classmethod
    def read(cls) -> Self:
        """Read the process table."""
        children: defaultdict[int, list[int]] = defaultdict(list)
        used = {}
        for name in os.listdir("/proc"):  # noqa: PTH208 hot
            if name.isdigit():
                with suppress(OSError):
                    fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                    children[int(fields[1])].append(int(name))
                    # Time of the process and of the children that it has waited for; resident pages.
                    used[int(name)] = sum(map(int, fields[11:15])) / _TICKS, int(fields[21]) * _PAGE
        return cls(dict(children), used)

    def of(self, pid: int, log: Path) -> Usage:
        """Return the usage of a process and its descendants, which write to `log`."""
        tree = [pid]
        for process in tree:
            tree += self._children.get(process, ())
        used = [self._used.get(process, (0.0, 0)) for process in tree]
        size = 0
        with suppress(OSError):
            size = log.stat().st_size
        return Usage(sum(cpu for cpu, _ in used), sum(memory for _, memory in used), size)
