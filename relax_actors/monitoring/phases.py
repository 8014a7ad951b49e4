"""Phases of one `relax up`: how long until its actors were ready, and until its first optimizer step."""

from __future__ import annotations

import time
from collections.abc import Collection

from relax_actors.isolation.proc import TICKS, process
from relax_actors.monitoring.log_message import LogMessage


def process_start() -> float:
    """Return the Unix time at which this process was started, which is before its imports and checks."""
    own = process()
    age = 0.0 if own is None else time.clock_gettime(time.CLOCK_BOOTTIME) - own.start / TICKS
    return time.time() - age


class Phases:
    """Times of the phases, from the events and metrics of the run.

    Args:
        began: Unix time of the start; the log may hold messages of earlier starts.
        actors: names of the actors that are started.
    """

    def __init__(self, began: float, actors: Collection[str]) -> None:
        self._began, self._starting = began, set(actors)
        self._ready = 0.0
        self._first_step: float | None = None

    def take(self, message: LogMessage) -> None:
        """Record an event `ready` or a metric of the trainer; ignore other, earlier and malformed messages."""
        is_ready = message.is_event and message.kind == "ready" and message.sender in self._starting
        is_step = not message.is_event and message.kind == "step" and self._first_step is None
        if message.claim or not (is_ready or is_step):
            return
        try:
            at = float(message.body["time"])
        except (ValueError, TypeError, KeyError, OverflowError):
            return
        if not at >= self._began:
            return
        if is_step:
            self._first_step = at
        else:
            self._starting.remove(message.sender)
            self._ready = max(self._ready, at)

    @property
    def seconds_to_ready(self) -> float | None:
        """Seconds until all actors were ready; None if one of them was not."""
        return None if self._starting else round(self._ready - self._began, 2)

    @property
    def seconds_to_first_step(self) -> float | None:
        """Seconds until the first optimizer step; None if there was none."""
        return None if self._first_step is None else round(self._first_step - self._began, 2)

    @property
    def seconds(self) -> float:
        """Seconds until now."""
        return time.time() - self._began
