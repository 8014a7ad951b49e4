"""Log and events of what happens to the children of a root."""

from __future__ import annotations

import time

import structlog

from relax_actors.runtime.blackbox import Snapshot
from relax_actors.supervision.root_status import RootStatusPublisher
from relax_actors.supervision.spec import Blame, Exit, Failure
from relax_actors.supervision.supervisor import GiveUp

log = structlog.get_logger()


class SupervisionLog:
    """Logs and publishes what happens to a root's children; the node reports its own actors."""

    def __init__(self) -> None:
        self.status_publisher: RootStatusPublisher | None = None
        self.failure: Failure | None = None
        """The child that the node gave up on, if it reported one."""
        self._ended: dict[str, float] = {}
        self._starts: dict[str, int] = {}

    def started(self, child: str, pid: int, starts: int) -> None:
        """Log the start of a child."""
        log.info("started", child=child, pid=pid, starts=starts)
        self._starts[child] = starts

    def ready(self, child: str, seconds: float) -> None:
        """Log that a child is ready; publish `repaired` after a failure."""
        log.info("ready", child=child, seconds=round(seconds, 3))
        ended = self._ended.pop(child, None)
        if ended is not None and self.status_publisher is not None:
            down = round(time.monotonic() - ended, 3)
            self.status_publisher.event("repaired", child, seconds=down, restarts=self._starts[child] - 1)

    def ended(self, child: str, outcome: Exit, _last: Snapshot) -> None:
        """Log the failure of a child; publish `down`."""
        if outcome.normal and outcome.blame is not Blame.EXTERNAL:
            return
        log.warning("crashed", child=child, reason=outcome.reason)
        self.failure = outcome.child_failure or self.failure
        self._ended.setdefault(child, time.monotonic())
        if self.status_publisher is not None:
            self.status_publisher.event("down", child, reason=outcome.reason)

    def gave_up(self, pool: str, report: GiveUp) -> None:
        """Log that the supervisor gave up on a child."""
        log.error("gave_up", pool=pool, child=report.child, reason=report.reason)
