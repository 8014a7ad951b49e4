"""Actors that share a device compute in turns: one lock file a device, held by the process that computes.

Invariant: at most one process holds a device. The kernel frees it when its holder ends, however that comes. Who waits
also holds the device's second lock, so that the one that had the device cannot take it again before it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_actors.errors import ActorError
from relax_actors.runtime.context import Context

SAY_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.005


class DeviceLock:
    """One actor's turns on a device; call it for a context in which the device is its own.

    Args:
        path: the device's lock file; a second one lies beside it.
        context: the actor's: its progress goes on while it waits, and its events tell of long waits.
        patience: seconds after which waiting is given up.
    """

    def __init__(self, path: Path, context: Context, patience: float) -> None:
        self._context, self._patience = context, patience
        path.parent.mkdir(parents=True, exist_ok=True)
        self._name = path.stem
        self._device = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._next = os.open(path.with_suffix(".next"), os.O_RDWR | os.O_CREAT, 0o600)
        self.waited_seconds = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Wait for the device, and have it until the end of the block.

        Raises:
            ActorError: it was not free for `patience` seconds.
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
        pause, said = FIRST_PAUSE, began
        while not _taken(lock):
            now = time.monotonic()
            if now - began > self._patience:
                msg = (
                    f"device {self._name} was not free for {now - began:.0f} s, {self.holder} has it; "
                    "raise placement.patience if that is how long it computes"
                )
                raise ActorError(msg)
            if now - said > SAY_SECONDS:
                said = now
                seconds = round(now - began, 1)
                self._context.journal.event(
                    "waiting_for_device", device=self._name, holder=self.holder, seconds=seconds
                )
            self._context.progress()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    @property
    def holder(self) -> str:
        """Who had the device last: role, number and incarnation."""
        return os.pread(self._device, 80, 0).decode(errors="replace").strip() or "nobody"

    def close(self) -> None:
        """Close the files."""
        os.close(self._device)
        os.close(self._next)


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
