"""Lock that threads get in the order in which they ask for it."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """First-come, first-served lock; not reentrant.

    `threading.Lock` may give a thread that releases it and asks again precedence over one that waits. A trainer that
    computes on one part of a step after the other would then delay the publication of its weights.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        # Of the thread that holds the lock, then those of the threads that wait.
        self._queue: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        """Wait for this thread's turn."""
        turn = threading.Event()
        with self._guard:
            if not self._queue:
                turn.set()
            self._queue.append(turn)
        turn.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the turn to the thread that has waited longest."""
        with self._guard:
            self._queue.popleft()
            if self._queue:
                self._queue[0].set()
