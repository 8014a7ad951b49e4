"""Repairs of a run's table, in a thread of their own: the root's status is published while a repair takes long."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

import nats.errors
import structlog

from broker.connection import Connection
from relax_actors.errors import BrokerError
from relax_actors.runtime.journal import Journal

REPAIR_SECONDS = 1.0
log = structlog.get_logger()


class Repairs(threading.Thread):
    """Calls a repair every second until it is halted; errors are reported and end no later repair.

    Args:
        connection: the connection to the broker; closed after `halt`, which ends a running request.
        journal: publishes event `repair_failed`.
        repair: returns a function that repairs the run's table.
    """

    def __init__(
        self, connection: Connection, journal: Journal, repair: Callable[[Connection, Journal], Callable[[], None]]
    ) -> None:
        super().__init__(name="repairs", daemon=True)
        self._connection, self._journal, self._make = connection, journal, repair
        self._halt = threading.Event()

    def halt(self) -> None:
        """Stop the thread after the running repair; callable from any thread."""
        self._halt.set()

    def run(self) -> None:
        """Repair until halted."""
        repair: Callable[[], None] | None = None
        while not self._halt.is_set():
            try:
                repair = repair or self._make(self._connection, self._journal)
                repair()
            except (BrokerError, nats.errors.Error) as error:
                log.debug("table_not_repaired", error=str(error))
            except Exception as error:  # noqa: BLE001 the next repair may succeed
                if not self._halt.is_set():
                    text, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
                    self._journal.event("repair_failed", error=text[:2000], traceback=trace[-8000:])
            self._halt.wait(REPAIR_SECONDS)
