"""Looks after one actor from within its process: progress, memory, and room on the disk."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from relax_actors.errors import StoreFullError
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.exit_codes import EXIT_CRASHED, EXIT_HUNG
from relax_actors.runtime.mailbox import stack_of
from relax_actors.runtime.pauses import Pauses, unusual
from relax_actors.runtime.role import Context

MIB = 1 << 20
LOOK_SECONDS = 1.0
SAY_SECONDS = 10.0


class Watch:
    """Sees to it that work in the role's thread makes progress within its bounds; ends the process if it does not.

    Args:
        context: the actor's surroundings.
        box: its black box.
        deadline: seconds without progress, while rows are in hand, after which it counts as hung.
        report: told why the process is about to end.
        memory_limit_mib: memory that the process may use; not bounded if None.
    """

    def __init__(
        self,
        context: Context,
        box: BlackBox,
        deadline: float,
        report: Callable[[str], None],
        memory_limit_mib: int | None = None,
    ) -> None:
        self._context, self._box, self._deadline, self._report = context, box, deadline, report
        self._memory_mib = memory_limit_mib
        self._last = time.monotonic()
        self._pauses, self._cpu = Pauses(unusual(context.config.supervision.heartbeat)), 0.0
        self.busy = False
        self._busy_since = self._busy_before = 0.0
        self.thread_id: int | None = None
        self.took = box.took
        context.progress = self.progress
        context.waits_for = self.end
        # Whoever waits for the broker does not hang.
        context.table.connection.on_wait = self.progress

    def progress(self) -> None:
        """The role works; called from its thread."""
        self._last = time.monotonic()

    def begin(self, rows: list[str]) -> None:
        """The role handles these rows from now on."""
        self._box.record(rows)
        self.work()

    def end(self, waits_for: str) -> None:
        """The role is done, and waits."""
        self.rest()
        self._box.record([], waits_for)

    def work(self) -> None:
        """The role is asked to do something."""
        self._last = time.monotonic()
        if not self.busy:
            self.busy, self._busy_since = True, self._last

    def rest(self) -> None:
        """It has done it."""
        self._busy_before, self.busy = self.busy_seconds, False

    @property
    def busy_seconds(self) -> float:
        """Time with rows in hand, so far."""
        return self._busy_before + (time.monotonic() - self._busy_since if self.busy else 0.0)

    def check(self) -> None:
        """Give a sign of life, or end a process whose role hangs or takes too much memory."""
        now, cpu = time.monotonic(), time.process_time()
        # While the whole process stood still the role had no time in which to make progress.
        self._last = min(now, self._last + self._pauses.look(now, cpu - self._cpu))
        self._cpu = cpu
        silent = now - self._last
        rows = ", ".join(self._box.read().rows)
        if self.busy and silent > self._deadline:
            stack = stack_of(self.thread_id)
            self._report(
                f"no progress for {silent:.1f} s (deadline {self._deadline:g} s) with {rows}; it was at:\n{stack}"
            )
            os._exit(EXIT_HUNG)
        if self._memory_mib is not None and (used := resident_mib()) > self._memory_mib:
            self._report(f"{used} MiB of memory in use, more than memory_limit_mib = {self._memory_mib}, with {rows}")
            os._exit(EXIT_CRASHED)
        self._box.beat()


class RoomWait:
    """Waits for room on a full disk: what `Store` and checkpoints call when there is none.

    Args:
        context: whose event says so, and whose progress goes on meanwhile.
        patience: seconds until giving up.
    """

    def __init__(self, context: Context, patience: float) -> None:
        self._context, self._patience = context, patience
        self._began = self._asked = self._said = float("-inf")

    def __call__(self, error: StoreFullError) -> None:
        """Wait a little.

        Raises:
            StoreFullError: it lasts for too long, or the actor is to end.
        """
        now = time.monotonic()
        if now - self._asked > 2 * LOOK_SECONDS + SAY_SECONDS:
            self._began = now
        self._asked = now
        if now - self._began > self._patience or self._context.stopping():
            raise error
        if now - self._said > SAY_SECONDS:
            self._said = now
            self._context.journal.event("waiting_for_room", error=str(error), seconds=round(now - self._began, 1))
        self._context.progress()
        time.sleep(LOOK_SECONDS)


def bound_memory(memory_limit_mib: int) -> None:
    """Make the kernel refuse this process more than so much memory of its own, so that a greedy row fails alone."""
    bound = memory_limit_mib * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def resident_mib() -> int:
    """Memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // MIB
