"""Health check of the embedded broker: it answers, its JetStream serves, and it can write."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from broker.address import Address
from broker.server import Server, is_jetstream_ready
from relax_actors.supervision.outcome import Verdict
from relax_actors.supervision.spec import Blame

# After a failed write, e.g. on a full disk, the server answers no further writes to that stream until it is restarted.
_CANNOT_WRITE = b"critical write error"
ROOM = 16 << 20
ASK_SECONDS = 1.5
"""Upper bound for the time between two unanswered requests."""
MOST_STARVED = 10.0
"""Heartbeats without an answer after which a server is killed even if the machine gave it no time to answer."""


class BrokerHealth:
    """Health check of one incarnation of the server; create it just before the server starts.

    A server that does not answer is dead only if it could have answered. Time in which it waited for the processor or
    the disk does not count, nor time in which this process did: a restart would help neither. A stopped or deadlocked
    server waits for neither of them, and one that spins has the processor.

    Args:
        server: the server.
        address: its address.
        heartbeat: seconds without an answer after which the server counts as hung.
        patience: seconds to wait for room on a full disk.
        report: called with the reason of a wait, and with an empty text when the wait is over.
        starved: returns for how many seconds since the last call a process could not have answered; by default
            measured by `Starvation`.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        server: Server,
        address: Address,
        heartbeat: float,
        patience: float,
        report: Callable[[str], None],
        starved: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._address, self._report = server, address, report
        self._heartbeat, self._patience = heartbeat, patience
        self._read = server.log.stat().st_size if server.log.exists() else 0
        self._answered: float | None = None
        self._unanswered, self._starved = 0, 0.0
        self._measure, self._clock = starved or starved_with_this_process(), clock
        self._broken_since: float | None = None

    def __call__(self, pid: int) -> Verdict | None:
        """Return why the server, process `pid`, must be killed now, or None."""
        answers = self._answered is None or is_jetstream_ready(self._address)
        now, starved = self._clock(), self._measure(pid)
        if self._answered is None or answers:
            self._answered, self._unanswered, self._starved = now, 0, 0.0
        else:
            self._unanswered += 1
            self._starved += starved
        silent = now - self._answered
        is_dead = silent - self._starved > self._heartbeat or silent > MOST_STARVED * self._heartbeat
        # Elapsed time alone is not enough: it also passes while the whole machine is paused and no server can answer.
        if is_dead and self._unanswered >= max(2.0, self._heartbeat / ASK_SECONDS):
            waited = f", {self._starved:.1f} s of them without processor or disk" if self._starved >= 1 else ""
            return Verdict(f"no answer for {silent:.1f} s{waited} (supervision.heartbeat)", blame=Blame.NONE)
        if self._broken_since is None and self._cannot_write():
            self._broken_since = now
        return None if self._broken_since is None else self._wait_for_room(now - self._broken_since)

    def _wait_for_room(self, waited: float) -> Verdict | None:
        folder = self._server.folder
        free = shutil.disk_usage(folder).free
        if free >= ROOM:
            self._report("")
            return Verdict("the broker could not write; restarted since there is room again", blame=Blame.NONE)
        text = f"the broker cannot write: {folder} has {free >> 20} MiB free; free space"
        if waited > self._patience:
            return Verdict(f"{text}, then start the run again (waited {waited:.0f} s, store.patience)", final=True)
        self._report(f"{text} (waited {waited:.0f} s)")
        return None

    def _cannot_write(self) -> bool:
        path = self._server.log
        with suppress(OSError):
            data = b""
            if path.stat().st_size < self._read:
                # The log was rotated: the rest of the previous one is in `<name>.1`.
                with suppress(OSError):
                    data = _after(path.with_name(f"{path.name}.1"), self._read)
                self._read = 0
            new = _after(path, self._read)
            # The line may arrive in two parts.
            self._read += max(0, len(new) - len(_CANNOT_WRITE))
            return _CANNOT_WRITE in (data + new).lower()
        return False


def _after(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()


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
