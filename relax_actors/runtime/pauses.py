"""Detection of pauses of the whole process: suspended, migrated, or asleep."""

from __future__ import annotations


class PauseDetector:
    """Detects that a regular check is `threshold` seconds late because of a pause.

    A supervisor uses it so that it does not take its own pause for the silence of a child.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._last: float | None = None

    def check(self, now: float, worked: float = 0.0) -> float:
        """Return the seconds since the last check if the process was paused since, else 0.

        A caller whose `worked`, its CPU seconds since the last check, are half of the time or more was busy, not
        paused.
        """
        gap = 0.0 if self._last is None else now - self._last
        self._last = now
        return gap if gap > self._threshold and worked < gap / 2 else 0.0


def tolerated_delay(heartbeat: float) -> float:
    """Return how many seconds late a check may be, if `heartbeat` of silence means death."""
    return max(0.5, heartbeat / 3)
