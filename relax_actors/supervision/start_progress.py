"""Progress of a start: tells a child that loads slowly, e.g. on a busy machine, from one that hangs.

A start is ended when its deadline has passed and its processes have made no visible progress for a third of the
deadline. A process that waits in a loop may use CPU time forever, so `START_LIMIT` deadlines end every start.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from relax_actors.config.infrastructure import START_LIMIT
from relax_actors.isolation.proc import Process, descendants

WINDOW, READINGS = 1 / 3, 4
"""Share of the start deadline in which a start must make progress, and readings in that time."""
BUSY = 0.05
"""Share of a core from which a start makes progress; processes that only poll stay below it."""
LOADED_BYTES = 16 << 20
"""Memory that a start must have added to make progress."""


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


def usage_of(pid: int, log: Path, table: dict[int, Process]) -> Usage:
    """Return what a process and its descendants, which write to `log`, have used by a table of all processes."""
    tree = [table[process] for process in descendants({pid}, table) if process in table]
    size = 0
    with suppress(OSError):
        size = log.stat().st_size
    return Usage(sum(process.cpu for process in tree), sum(process.memory for process in tree), size)
