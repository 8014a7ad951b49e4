"""Messages that were sent, claimed in a file of the run's folder beforehand.

A notifier that is killed in between has not sent the message, and no other one sends it: at most once.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

MAX_KEYS = 2000
"""Claimed messages that are remembered; the oldest ones are forgotten."""


class Sent:
    """Claims on messages in a file, which one process holds by a lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: IO[str] | None = None
        self._times: dict[str, float] = {}
        self._keys: list[str] = []

    def acquire(self) -> bool:
        """Take the lock and read the claims; False if another process has it."""
        lock = self._path.with_suffix(".lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return False
        self._lock = lock
        with suppress(OSError, ValueError, TypeError, AttributeError):  # none yet, or damaged: begin anew
            body: dict[str, Any] = json.loads(self._path.read_text())
            self._keys = [str(key) for key in body["keys"]]
            self._times = {str(rule): float(time) for rule, time in body["times"].items()}
        return True

    def is_new(self, key: str) -> bool:
        """Whether nobody has claimed a message."""
        return key not in self._keys

    def is_due(self, rule: str, every: float, now: float) -> bool:
        """Whether the last message of a rule is at least `every` seconds ago; `now` is Unix time."""
        # A clock that was set back must not silence a rule for longer than that.
        return not 0 <= now - self._times.get(rule, float("-inf")) < every

    def claim(self, rule: str, keys: list[str], now: float) -> None:
        """Record a message that is about to be sent, durably."""
        self._keys = [*self._keys, *(key for key in keys if key not in self._keys)][-MAX_KEYS:]
        self._times[rule] = now
        new = self._path.with_suffix(".new")
        with new.open("w") as file:
            json.dump({"keys": self._keys, "times": self._times}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
