"""Time that nobody had: a container that was paused, a virtual machine that was moved, a laptop that slept."""

from __future__ import annotations


class PauseDetector:
    """Tells whoever looks regularly how long it could not, so that it does not take its own silence for another's.

    Args:
        most: seconds between two looks that are nothing unusual.
    """

    def __init__(self, most: float) -> None:
        self._threshold = most
        self._last: float | None = None

    def look(self, now: float, worked: float = 0.0) -> float:
        """Seconds since the last look if it was too long ago, else 0.

        Args:
            now: seconds on the monotonic clock.
            worked: processor seconds that whoever looks took since the last look; who is busy does not stand still.
        """
        gap = 0.0 if self._last is None else now - self._last
        self._last = now
        return gap if gap > self._threshold and worked < gap / 2 else 0.0


def tolerated_delay(heartbeat: float) -> float:
    """How long a look may be late where `heartbeat` seconds of silence are a death: what is less does no harm."""
    return max(0.5, heartbeat / 3)
