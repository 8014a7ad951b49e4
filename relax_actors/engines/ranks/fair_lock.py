"""Fair lock: threads acquire it in the order of their requests."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """First-come, first-served lock; not reentrant.

    `threading.Lock` may give a thread that releases it and asks again precedence over one that waits. A trainer that
    computes on one part of a step after the other would then delay the publication of its weights.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        # Of the thread that holds the lock, then those of the threads that wait.
        self._queue: deque[threading.Event] = deque()

    @property
    def waiting(self) -> int:
        """Number of threads that wait."""
        return max(0, len(self._queue) - 1)

    def __enter__(self) -> None:
        """Wait until this thread has the lock."""
        turn = threading.Event()
        with self._guard:
            if not self._queue:
                turn.set()
            self._queue.append(turn)
        turn.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lock to the thread that has waited longest."""
        with self._guard:
            self._queue.popleft()
            if self._queue:
                self._queue[0].set()
