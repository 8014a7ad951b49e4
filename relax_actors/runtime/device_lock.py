"""Lock of devices that several actors share: the holder of the lock files may compute, and has its memory there.

Invariant: at most one process holds a device. The kernel releases the locks when their holder ends, however it ends.
The next waiter of a device also holds a second lock, so that the actor that just released the device cannot take it
again first.

An engine that can leave the device (`ReleasesMemory`) stays on it after its turn as long as nobody waits, and leaves
it before the locks are released: the memory of a device is that of one holder, and an actor that computes again and
again pays nothing.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from broker.files import open_lock
from relax_actors.errors import ActorError
from relax_actors.runtime.context import Context

REPORT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.005
WATCH_SECONDS = 0.01
ROOM_SECONDS = 20.0
"""Time for the memory of a killed holder to become free."""
OUT_OF_MEMORY = "OutOfMemoryError"
"""Name of torch's error."""


@runtime_checkable
class ReleasesMemory(Protocol):
    """Engine whose tensors can leave its device while other actors compute there. Both methods may be called twice."""

    def release_memory(self) -> int:
        """Move the tensors to host memory; return the bytes that became free on the device."""

    def resume_memory(self) -> int:
        """Move them back; return their bytes."""


class DeviceLock:
    """Locks of an actor's devices; each call returns a context in which the actor holds them.

    Args:
        paths: the devices' lock files, in an order that all actors share; a second lock file is created beside each.
        context: the actor's context. Waiting counts as progress; long waits are reported in events.
        patience: seconds to wait before giving up.
    """

    def __init__(self, paths: Sequence[Path], context: Context, patience: float) -> None:
        self._context, self._patience = context, patience
        self._devices = [_Device(path) for path in paths]
        self._engines: list[ReleasesMemory] = []
        # Guards what follows: a thread hands the devices over while the actor does not compute.
        self._turn = threading.Lock()
        self._holds, self._computing = False, 0
        self._closed = threading.Event()
        self.waited_seconds = self.moving_seconds = 0.0
        self.released_bytes = 0
        """Bytes that left the devices at the last handover."""

    def add(self, engine: object) -> None:
        """Have an engine leave the devices whenever others compute there, from now on; other objects are ignored."""
        if not isinstance(engine, ReleasesMemory):
            return
        with self._turn:
            self._engines.append(engine)
            if not self._holds:
                engine.release_memory()
        if len(self._engines) == 1:
            threading.Thread(target=self._watch, name="device-handover", daemon=True).start()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Wait for the devices and hold them until the end of the block; within another block there is no wait.

        Raises:
            ActorError: they were not free for `patience` seconds.
        """
        with self._turn:
            if not self._holds:
                self._take()
            self._computing += 1
        try:
            yield
        finally:
            with self._turn:
                self._computing -= 1
                if not self._computing and (not self._engines or self._is_wanted()):
                    self._hand_over()

    def _take(self) -> None:
        began = time.monotonic()
        taken: list[_Device] = []
        try:
            for device in self._devices:
                self._wait(device, device.next, began)
                try:
                    self._wait(device, device.lock, began)
                    taken.append(device)
                finally:
                    fcntl.flock(device.next, fcntl.LOCK_UN)
        except BaseException:
            for device in taken:
                fcntl.flock(device.lock, fcntl.LOCK_UN)
            raise
        self._holds = True
        for device in self._devices:
            os.pwrite(device.lock, self._context.author.encode().ljust(80), 0)
        arrived = time.monotonic()
        self.waited_seconds += arrived - began
        try:
            self._resume(arrived)
        except BaseException:
            self._hand_over()
            raise
        self.moving_seconds += time.monotonic() - arrived

    def _resume(self, began: float) -> None:
        """Move the engines to the devices; the memory of a holder that was killed may become free only now.

        Raises:
            ActorError: they do not fit.
        """
        while True:
            try:
                for engine in self._engines:
                    engine.resume_memory()
            except RuntimeError as error:
                if type(error).__name__ != OUT_OF_MEMORY:
                    raise
                if time.monotonic() - began > ROOM_SECONDS:
                    names = " and ".join(device.name for device in self._devices)
                    msg = (
                        f"the memory of {self._context.author} does not fit on device {names} beside what others "
                        f"hold there: {error}; take other roles off it"
                    )
                    raise ActorError(msg) from error
            else:
                return
            self._context.progress()
            time.sleep(WATCH_SECONDS)

    def _hand_over(self) -> None:
        began = time.monotonic()
        try:
            self.released_bytes = sum(engine.release_memory() for engine in self._engines)
        finally:
            self.moving_seconds += time.monotonic() - began
            self._holds = False
            for device in self._devices:
                fcntl.flock(device.lock, fcntl.LOCK_UN)

    def _is_wanted(self) -> bool:
        """Return whether another actor waits for one of the devices."""
        return not all(_try_lock(device.next) and _unlock(device.next) for device in self._devices)

    def _watch(self) -> None:
        """Hand the devices over as soon as another actor waits for them while this one does not compute."""
        while not self._closed.wait(WATCH_SECONDS):
            try:
                with self._turn:
                    if self._holds and not self._computing and self._is_wanted():
                        self._hand_over()
            except BaseException as error:  # noqa: BLE001 ends the process with the error as the reason
                self._context.fail(error)
                return

    def _wait(self, device: _Device, lock: int, began: float) -> None:
        pause, reported_at = FIRST_PAUSE, began
        while not _try_lock(lock):
            now = time.monotonic()
            if now - began > self._patience:
                msg = (
                    f"device {device.name} was not free for {now - began:.0f} s, {device.holder} holds it; "
                    "raise placement.patience if it computes for that long"
                )
                raise ActorError(msg)
            if now - reported_at > REPORT_SECONDS:
                reported_at = now
                seconds = round(now - began, 1)
                self._context.journal.event(
                    "waiting_for_device", device=device.name, holder=device.holder, seconds=seconds
                )
            self._context.progress()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    @property
    def holder(self) -> str:
        """The actor that held the first device last, as `<role>.<n>#<incarnation>`."""
        return self._devices[0].holder

    def metrics(self) -> dict[str, float]:
        """Return the seconds of waiting and of moving memory so far, and the bytes that left at the last handover."""
        figures = {"device_wait_seconds": round(self.waited_seconds, 3)}
        if self._engines:
            figures["device_moving_seconds"] = round(self.moving_seconds, 3)
            figures["device_released_mib"] = self.released_bytes >> 20
        return figures

    def close(self) -> None:
        """Close the lock files."""
        self._closed.set()
        with self._turn:
            for device in self._devices:
                os.close(device.lock)
                os.close(device.next)
            self._devices = []


class _Device:
    """Lock files of a device: that of its holder, and that of the next one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.name = path.stem
        self.lock, self.next = open_lock(path), open_lock(path.with_suffix(".next"))

    @property
    def holder(self) -> str:
        return os.pread(self.lock, 80, 0).decode(errors="replace").strip() or "nobody"


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(lock: int) -> bool:
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True
