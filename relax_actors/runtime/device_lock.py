"""Lock of a device that several actors share: the holder of the lock file may compute.

Invariant: at most one process holds a device. The kernel releases the lock when its holder ends, however it ends. The
next waiter also holds a second lock, so that the actor that just released the device cannot take it again first.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.files import open_lock
from relax_actors.errors import ActorError
from relax_actors.runtime.context import Context

REPORT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.005


class DeviceLock:
    """Lock of one device for one actor; each call returns a context in which the actor holds the device.

    Args:
        path: the device's lock file; the second lock file is created beside it.
        context: the actor's context. Waiting counts as progress; long waits are reported in events.
        patience: seconds to wait before giving up.
    """

    def __init__(self, path: Path, context: Context, patience: float) -> None:
        self._context, self._patience = context, patience
        path.parent.mkdir(parents=True, exist_ok=True)
        self._name = path.stem
        self._device, self._next = open_lock(path), open_lock(path.with_suffix(".next"))
        self.waited_seconds = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Wait for the device and hold it until the end of the block.

        Raises:
            ActorError: the device was not free for `patience` seconds.
        """
        began = time.monotonic()
        self._wait(self._next, began)
        try:
            self._wait(self._device, began)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)
        self.waited_seconds += time.monotonic() - began
        try:
            os.pwrite(self._device, self._context.author.encode().ljust(80), 0)
            yield
        finally:
            fcntl.flock(self._device, fcntl.LOCK_UN)

    def _wait(self, lock: int, began: float) -> None:
        pause, reported_at = FIRST_PAUSE, began
        while not _try_lock(lock):
            now = time.monotonic()
            if now - began > self._patience:
                msg = (
                    f"device {self._name} was not free for {now - began:.0f} s, {self.holder} holds it; "
                    "raise placement.patience if it computes for that long"
                )
                raise ActorError(msg)
            if now - reported_at > REPORT_SECONDS:
                reported_at = now
                seconds = round(now - began, 1)
                self._context.journal.event(
                    "waiting_for_device", device=self._name, holder=self.holder, seconds=seconds
                )
            self._context.progress()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    @property
    def holder(self) -> str:
        """The actor that held the device last, as `<role>.<n>#<incarnation>`."""
        return os.pread(self._device, 80, 0).decode(errors="replace").strip() or "nobody"

    def close(self) -> None:
        """Close the lock files."""
        os.close(self._device)
        os.close(self._next)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
