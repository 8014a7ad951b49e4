"""Lock of shared devices: the holder may compute, and has its memory there.

Invariant: at most one process holds a device. The kernel releases the locks when their holder ends, however it ends.
The next waiter of a device also holds a second lock, so that the actor that just released the device cannot take it
again first.

An engine that can leave the device (`ReleasesMemory`) stays on it as long as nobody waits, and leaves it before the
locks are released: the memory of a device is that of one holder, and an actor that computes again and again pays
nothing. Since a move costs seconds, a turn also lasts while the holder has work (`Context.has_work`) and computes again
soon, up to a bound once another actor waits. Several devices are taken in the order of their paths, and several engines
of an actor leave in the order in which they were added and return in the opposite one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from broker.files import try_lock, unlock
from relax_actors.errors import ActorError, StoreFullError
from relax_actors.runtime.context import Context
from relax_actors.runtime.device_files import Device

REPORT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.005
WATCH_SECONDS = 0.01
IDLE_SECONDS = 5.0
"""Seconds without computing after which a holder with work hands the devices over: it waits for something else, such as
room in a full table, which may come when others go on."""
ROOM_SECONDS = 20.0
"""Time for the memory of a killed holder to become free."""
OUT_OF_MEMORY = "OutOfMemoryError"
"""Name of torch's error."""


@runtime_checkable
class ReleasesMemory(Protocol):
    """Engine whose tensors can leave its device; both methods may be called twice."""

    def release_memory(self, folder: Path | None) -> int:
        """Move the tensors off the device; return the bytes that became free there.

        Args:
            folder: folder of a file to move them to, also from the CPU; None for host memory.

        Raises:
            OSError: the disk is full; the tensors can still be used.
        """

    def resume_memory(self) -> int:
        """Move them back; return their bytes."""


@dataclass(slots=True)
class Moves:
    """Moves of memory in one direction: number, seconds, and bytes of the last one."""

    count: int = 0
    size: int = 0
    seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Record a move."""
        self.count, self.size, self.seconds = self.count + 1, size, self.seconds + seconds

    def metrics(self, name: str) -> dict[str, float]:
        """Return the figures for the metrics of an actor."""
        return {f"{name}_mib": self.size >> 20, f"{name}_seconds": round(self.seconds, 3)}


class DeviceLock:
    """Locks of an actor's devices; each call returns a context in which the actor holds them.

    Args:
        paths: the devices' lock files, in an order that all actors share; a second lock file is created beside each.
        context: the actor's context. Waiting counts as progress; long waits are reported in events.
        patience: seconds for which one other actor may hold a device after its turn before waiting for it fails.
        turn: seconds that other actors wait while this one has more work, if its memory leaves.
        folder: folder of the files that engines move their memory to; None for host memory.
    """

    def __init__(
        self, paths: Sequence[Path], context: Context, patience: float, *, turn: float = 0.0, folder: Path | None = None
    ) -> None:
        self._context, self._patience, self._turn_seconds, self._folder = context, patience, turn, folder
        self._devices = [Device(path) for path in paths]
        self._engines: list[ReleasesMemory] = []
        # Guards what follows: a thread hands the devices over while the actor does not compute.
        self._turn = threading.Lock()
        self._holds, self._computing = False, 0
        self._wanted_since: float | None = None
        self._idle_since = 0.0
        self._closed = threading.Event()
        self.waited_seconds = 0.0
        self.released, self.resumed = Moves(), Moves()
        """Moves of memory off the devices and back."""

    def add(self, engine: object) -> None:
        """Have an engine leave the devices whenever others compute there; ignores other objects."""
        if not isinstance(engine, ReleasesMemory):
            return
        with self._turn:
            self._engines.append(engine)
            if not self._holds:
                self._release([engine])
        if len(self._engines) == 1:
            threading.Thread(target=self._watch, name="device-handover", daemon=True).start()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Wait for the devices and hold them until the end of the block; blocks may nest.

        Raises:
            ActorError: another actor held one of them for `turn` and `patience` seconds.
        """
        with self._turn:
            if not self._holds:
                self._take()
            self._computing += 1
        try:
            yield
        finally:
            with self._turn:
                self._computing, self._idle_since = self._computing - 1, time.monotonic()
                if not self._computing and (not self._engines or self._ends_turn()):
                    self._hand_over()

    def is_due(self) -> bool:
        """Return whether the holder must take no further work in, as another's turn is due; for the role's thread."""
        return self._holds and self._is_wanted() and (not self._engines or self._is_overdue())

    def _take(self) -> None:
        began = time.monotonic()
        taken: list[Device] = []
        try:
            # The holders of all devices see the wish at once, and give them up at the same time.
            for device in self._devices:
                self._wait(device, device.next, began)
            for device in self._devices:
                self._wait(device, device.lock, began)
                taken.append(device)
                os.pwrite(device.lock, self._context.author.encode().ljust(80), 0)
        except BaseException:
            for device in taken:
                fcntl.flock(device.lock, fcntl.LOCK_UN)
            raise
        finally:
            for device in self._devices:
                fcntl.flock(device.next, fcntl.LOCK_UN)
        self._holds, self._wanted_since = True, None
        arrived = time.monotonic()
        self.waited_seconds += arrived - began
        try:
            self._resume(arrived)
        except BaseException:
            self._hand_over()
            raise

    def _resume(self, began: float) -> None:
        """Move the engines to the devices; memory of a killed holder may become free only now.

        Raises:
            ActorError: they do not fit.
        """
        size = 0
        while True:
            try:
                for engine in reversed(self._engines):
                    size += engine.resume_memory()
            except Exception as error:
                if OUT_OF_MEMORY not in f"{type(error).__name__} {error}":
                    raise
                if time.monotonic() - began > ROOM_SECONDS:
                    names = " and ".join(device.name for device in self._devices)
                    msg = (
                        f"the memory of {self._context.author} does not fit on device {names} beside what others "
                        f"hold there: {error}; take other roles off it"
                    )
                    raise ActorError(msg) from error
            else:
                self.resumed.add(size, time.monotonic() - began)
                return
            self._context.progress()
            time.sleep(WATCH_SECONDS)

    def _release(self, engines: Sequence[ReleasesMemory]) -> None:
        """Move engines off the devices, and wait for room if their memory goes to a full disk.

        Raises:
            StoreFullError: the disk stayed full for `store.patience` seconds.
        """
        began, size = time.monotonic(), 0
        for engine in engines:
            while True:
                try:
                    size += engine.release_memory(self._folder)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    msg = (
                        f"{self._folder} has no room for the memory that {self._context.author} takes off its device "
                        f'({error}). Free space, or set placement.release = "host"'
                    )
                    self._context.wait_for_room(StoreFullError(msg))
                else:
                    break
        self.released.add(size, time.monotonic() - began)

    def _hand_over(self) -> None:
        try:
            if self._engines:
                self._release(self._engines)
                self._context.journal.metric({"kind": "turn", **self.metrics()})
        finally:
            self._holds, self._wanted_since = False, None
            for device in self._devices:
                fcntl.flock(device.lock, fcntl.LOCK_UN)

    def _is_wanted(self) -> bool:
        """Return whether another actor waits for one of the devices; notes since when."""
        if all(try_lock(device.next) and unlock(device.next) for device in self._devices):
            self._wanted_since = None
            return False
        self._wanted_since = self._wanted_since or time.monotonic()
        return True

    def _is_overdue(self) -> bool:
        since = self._wanted_since
        return since is not None and time.monotonic() - since >= self._turn_seconds

    def _ends_turn(self) -> bool:
        """Return whether another actor waits, and this one has no more work, is idle, or is overdue."""
        if not self._is_wanted():
            return False
        is_idle = time.monotonic() - self._idle_since > IDLE_SECONDS
        return is_idle or self._is_overdue() or not self._context.has_work()

    def _watch(self) -> None:
        """Hand the devices over when the turn has ended and this actor does not compute."""
        while not self._closed.wait(WATCH_SECONDS):
            try:
                with self._turn:
                    # Called while it computes, too: it notes since when another actor waits.
                    if self._holds and self._ends_turn() and not self._computing:
                        self._hand_over()
            except BaseException as error:  # noqa: BLE001 ends the process with the error as the reason
                self._context.fail(error)
                return

    def _wait(self, device: Device, lock: int, began: float) -> None:
        pause, reported_at, holder, held_since = FIRST_PAUSE, began, device.holder, time.monotonic()
        while not try_lock(lock):
            now = time.monotonic()
            if device.holder != holder:
                holder, held_since = device.holder, now
            if now - held_since > self._turn_seconds + self._patience:
                msg = (
                    f"device {device.name} was not free for {now - held_since:.0f} s, {holder} holds it; "
                    "raise placement.patience if it computes for that long, or lower placement.turn"
                )
                raise ActorError(msg)
            if now - reported_at > REPORT_SECONDS:
                reported_at = now
                seconds = round(now - began, 1)
                self._context.journal.event("waiting_for_device", device=device.name, holder=holder, seconds=seconds)
            self._context.progress()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    @property
    def holder(self) -> str:
        """The actor that held the first device last, as `<role>.<n>#<incarnation>`."""
        return self._devices[0].holder

    def metrics(self) -> dict[str, float]:
        """Return seconds of waiting, and turns, bytes and seconds of moving memory."""
        figures = {"device_wait_seconds": round(self.waited_seconds, 3)}
        if self._engines:
            figures["device_turns"] = self.released.count
            figures |= self.released.metrics("device_released") | self.resumed.metrics("device_resumed")
        return figures

    def close(self) -> None:
        """Close the lock files."""
        self._closed.set()
        with self._turn:
            for device in self._devices:
                device.close()
            self._devices = []
