"""Watchdog of an actor, in its process: progress, memory, and room on the disk."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_actors.errors import StoreFullError
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.context import Context
from relax_actors.runtime.exit_codes import EXIT_CRASHED, EXIT_HUNG
from relax_actors.runtime.pauses import PauseDetector, tolerated_delay
from relax_actors.runtime.stacks import place, thread_stack

MIB = 1 << 20
POLL_SECONDS = 1.0
REPORT_SECONDS = 10.0
MAX_NAMED = 3


class Watchdog:
    """Ends the process if the role hangs or uses too much memory; records signs of life.

    Args:
        context: the actor's context; its `progress` and `report_waiting` are connected to this watchdog.
        box: the actor's black box.
        deadline: seconds without progress, while the role works, after which it counts as hung.
        report: called with the reason before the process ends.
        memory_limit_mib: resident memory limit of the process; None for no limit.
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
        self._pauses, self._cpu = PauseDetector(tolerated_delay(context.config.supervision.heartbeat)), 0.0
        self.busy, self._stage = False, ""
        self._rows: list[str] = []
        self._busy_since = self._busy_before = 0.0
        self.thread_id: int | None = None
        self.record_delivery, self.forget_deliveries = box.record_delivery, box.forget_deliveries
        context.progress = self.progress
        context.report_waiting = self.report_waiting
        # Waiting for the broker is no hang.
        context.table.connection.on_wait = self.progress

    def progress(self) -> None:
        """Record progress of the role."""
        self._last = time.monotonic()

    def start_rows(self, rows: list[str]) -> None:
        """Record that the role begins to handle these rows."""
        self._rows = rows
        self._box.record(rows)
        self.start_work(f"handling {enumerate_rows(rows)}")

    def start_other_work(self, stage: str) -> None:
        """Record that the role begins to do something that is not handling rows, as `stage` says."""
        self._rows = []
        self._box.record([])
        self.start_work(stage)

    def start_waiting(self, waiting_for: str) -> None:
        """Record that the role is done and waits."""
        self._rows = []
        self.report_waiting(waiting_for)

    def report_waiting(self, waiting_for: str) -> None:
        """Record what the role waits for; the rows that it is handling stay recorded beside it."""
        self.end_work()
        self._box.record(self._rows, waiting_for)

    def end_idle_work(self) -> None:
        """Record that a stateful role has done its background work, and waits for cells."""
        self.end_work()
        if not self._box.read().waiting_for:
            self._box.record([], "new cells")

    def start_work(self, stage: str) -> None:
        """Record that the role begins to work; `stage` completes "the actor was ..." in reports."""
        self._last, self._stage = time.monotonic(), stage
        if not self.busy:
            self.busy, self._busy_since = True, self._last

    def end_work(self) -> None:
        """Record that the role has finished its work."""
        self._busy_before, self.busy = self.busy_seconds, False

    @property
    def busy_seconds(self) -> float:
        """Seconds that the role has worked so far."""
        return self._busy_before + (time.monotonic() - self._busy_since if self.busy else 0.0)

    def check(self) -> None:
        """Record a sign of life, or end the process if the role hangs or exceeds its memory limit."""
        now, cpu = time.monotonic(), time.process_time()
        # A pause of the whole process does not count as lack of progress.
        self._last = min(now, self._last + self._pauses.check(now, cpu - self._cpu))
        self._cpu = cpu
        silent = now - self._last
        if self.busy and silent > self._deadline:
            stack = thread_stack(self.thread_id)
            # The first line is the reason that supervisors, views and reports show.
            self._report(
                f"no progress for {silent:.1f} s while {self._stage}, in {place(stack)}; its deadline is "
                f"{self._deadline:g} s. Raise `deadline` if such a row may take longer\n{''.join(stack.format())}"
            )
            os._exit(EXIT_HUNG)
        if self._memory_mib is not None and (used := resident_mib()) > self._memory_mib:
            self._report(
                f"{used} MiB of memory in use while {self._stage}, more than memory_limit_mib = {self._memory_mib}"
            )
            os._exit(EXIT_CRASHED)
        self._box.beat()


def enumerate_rows(rows: Sequence[str]) -> str:
    """Name the first rows of several, and how many there are."""
    more = f" and {len(rows) - MAX_NAMED} more rows" if len(rows) > MAX_NAMED else ""
    return f"{', '.join(rows[:MAX_NAMED]) or 'no row'}{more}"


class DiskSpaceWait:
    """Waits for room on a full disk, which counts as progress.

    It gives up after `patience` seconds.
    """

    def __init__(self, context: Context, patience: float) -> None:
        self._context, self._patience = context, patience
        self._began = self._asked = self._reported_at = float("-inf")

    def __call__(self, error: StoreFullError) -> None:
        """Wait for a moment before the caller's next try.

        Raises:
            StoreFullError: the disk has been full for `patience` seconds, or the actor was asked to stop.
        """
        now = time.monotonic()
        if now - self._asked > 2 * POLL_SECONDS + REPORT_SECONDS:
            self._began = now
        self._asked = now
        if now - self._began > self._patience or self._context.stopping():
            raise error
        if now - self._reported_at > REPORT_SECONDS:
            self._reported_at = now
            self._context.journal.event("waiting_for_room", error=str(error), seconds=round(now - self._began, 1))
        self._context.progress()
        time.sleep(POLL_SECONDS)


def limit_memory(memory_limit_mib: int) -> None:
    """Limit the data segment in the kernel: a larger allocation fails with MemoryError."""
    bound = memory_limit_mib * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def resident_mib() -> int:
    """Return the resident memory of this process in MiB, without files and memory that it shares, such as weights."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split(maxsplit=1)[0]) // 1024
