"""Times of a run's operations as its root measures them."""

from __future__ import annotations

import time
from collections.abc import Callable

from relax_actors.operations import History, State


class OperationTimes:
    """When a root first saw its operations, and what it found at its start.

    Ages are of one monotonic clock: the times in the cells are of the clocks of clients, and include the time during
    which the run was not up. One object lives as long as the root, so that a new connection renews no deadline.

    Args:
        now: returns seconds on a monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.began = time.time()
        """Seconds since 1970 at which the root started."""
        self.now = now
        self._seen: dict[tuple[int, State], float] = {}
        self._ended: frozenset[int] | None = None
        self._configured: dict[int, int] = {}

    def age(self, operation: int, state: State = State.PENDING) -> float:
        """Return the seconds since an operation was first seen; with a state, since the first call with this state."""
        now = self.now()
        return now - self._seen.setdefault((operation, state), now)

    def look(self, history: History, replicas: Callable[[str], int | None]) -> None:
        """Start the time of new operations. The first call records what the root found at its start.

        Args:
            history: all operations.
            replicas: returns the configured number of actors of a role; None for a role that the run does not have.
        """
        for operation in history.running:
            self.age(operation.id)
        if self._ended is None:
            self._ended = frozenset(o.id for o in history.operations.values() if o.is_over)
            planned = [o for o in history.running if o.request.kind == "scale" and o.plan and o.plan.node == 0]
            numbers = {o.id: replicas(o.request.role) for o in planned}
            self._configured = {number: count for number, count in numbers.items() if count is not None}

    def had_ended(self, operation: int) -> bool:
        """Return whether an operation had ended when the root started."""
        return operation in (self._ended or ())

    def number_before(self, operation: int, planned: int) -> int:
        """Return how many actors to have on the node of `relax up` if an operation is undone.

        Args:
            operation: number of the operation.
            planned: number before the operation, according to its plan. The configuration counts more if the root
                started after the plan was made.
        """
        return self._configured.get(operation, planned)
