"""Status of a root: events of its children, and a lease with their states."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import nats.errors
import structlog

from broker.address import Address
from broker.connection import Connection
from broker.leases import RunState
from broker.streams import open_bucket
from broker.subjects import Subjects
from relax_actors.config import Config
from relax_actors.errors import BrokerError
from relax_actors.runtime.journal import Journal
from relax_actors.supervision.reporter import supervision_metric

MakeTask: TypeAlias = Callable[[Connection, Journal], Callable[[], None]]
BEAT_SECONDS, START_SECONDS = 1.0, 0.02
CONNECT_SECONDS = 10.0
log = structlog.get_logger()


class RootStatusPublisher(threading.Thread):
    """Publishes a root's status in a thread of its own, since the root's thread must not wait for the broker.

    Events that occur while the broker is unreachable are stored when it is back.

    Args:
        address: the broker.
        config: the run's configuration.
        states: returns the states of the root's children.
        number: number of the root's node.
        prepare: called with each new connection; returns the run's state, by default that of the existing bucket.
        tasks: called with each new connection; each returns a function that is then called again and again, see
            `RepeatedTask`. The numbers are the seconds between two calls.
    """

    def __init__(
        self,
        address: Address,
        config: Config,
        states: Callable[[], dict[str, Any]],
        number: int = 0,
        prepare: Callable[[Connection], RunState] | None = None,
        tasks: Mapping[MakeTask, float] | None = None,
    ) -> None:
        super().__init__(name="root-status", daemon=True)
        self._address, self._config, self._states, self._number = address, config, states, number
        self._prepare, self._tasks = prepare or self._open_state, tasks or {}
        self._events: queue.SimpleQueue[tuple[str, str, dict[str, Any]]] = queue.SimpleQueue()
        self._halt = threading.Event()

    def event(self, kind: str, child: str, **fields: Any) -> None:
        """Queue an event about a child; callable from any thread."""
        self._events.put((kind, child, fields))

    def close(self) -> None:
        """Stop the thread; events that are not stored yet are lost."""
        self._halt.set()

    def run(self) -> None:
        """Publish until closed."""
        while not self._halt.is_set():
            try:
                connection = Connection(self._address, "root", CONNECT_SECONDS)
            except BrokerError as error:
                log.debug("root_not_connected", error=str(error))
                self._halt.wait(BEAT_SECONDS)
                continue
            try:
                self._publish(connection)
            except (BrokerError, nats.errors.Error) as error:
                log.debug("status_not_published", error=str(error))
            finally:
                connection.close()

    def _open_state(self, connection: Connection) -> RunState:
        bucket = open_bucket(connection, Subjects(self._config.run.name), CONNECT_SECONDS)
        return RunState(connection, connection.call(bucket, CONNECT_SECONDS + 1))

    def _publish(self, connection: Connection) -> None:
        subjects = Subjects(self._config.run.name)
        journal = Journal(connection, subjects, "root", self._number, patience=None)
        tasks = [RepeatedTask(connection, journal, make, seconds) for make, seconds in self._tasks.items()]
        try:
            self._publish_until_closed(connection, journal, tasks)
        finally:
            for task in tasks:
                task.halt()

    def _publish_until_closed(self, connection: Connection, journal: Journal, tasks: list[RepeatedTask]) -> None:
        began, ttl = time.time(), max(2.0, self._config.supervision.heartbeat)
        state: RunState | None = None
        while not self._halt.wait(BEAT_SECONDS if state is not None else START_SECONDS):
            while not self._events.empty():
                kind, child, fields = self._events.get()
                journal.event(kind, role=child, **fields)
            if connection.nc.is_closed:
                return  # closed by the broker, e.g. for expired credentials; sign in again, with newer ones if any
            if not connection.nc.is_connected:
                continue
            try:
                if state is None:
                    state = self._prepare(connection)
                    for task in tasks:
                        task.start()
                children = self._states()
                of_node = f" of node {self._number}" if self._number else ""
                journal.metric(supervision_metric({f"{name}{of_node}": c for name, c in children.items()}))
                lease = {"pid": os.getpid(), "since": began, "children": children}
                connection.call(state.renew_lease("root", self._number, lease, ttl), CONNECT_SECONDS)
            except (BrokerError, nats.errors.Error) as error:
                log.debug("lease_not_renewed", error=str(error))


class RepeatedTask(threading.Thread):
    """Calls a function again and again until it is halted; errors are reported and end no later call.

    Args:
        connection: the connection to the broker; closed after `halt`, which ends a running request.
        journal: publishes event `repair_failed`.
        make: returns the function, such as one that repairs the run's table.
        seconds: pause between two calls.
    """

    def __init__(self, connection: Connection, journal: Journal, make: MakeTask, seconds: float) -> None:
        super().__init__(name="root-task", daemon=True)
        self._connection, self._journal, self._make, self._seconds = connection, journal, make, seconds
        self._halt = threading.Event()

    def halt(self) -> None:
        """Stop the thread after the running call; callable from any thread."""
        self._halt.set()

    def run(self) -> None:
        """Call until halted."""
        work: Callable[[], None] | None = None
        while not self._halt.is_set():
            try:
                work = work or self._make(self._connection, self._journal)
                work()
            except (BrokerError, nats.errors.Error) as error:
                log.debug("table_not_repaired", error=str(error))
            except Exception as error:  # noqa: BLE001 the next call may succeed
                if not self._halt.is_set():
                    text, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
                    self._journal.event("repair_failed", error=text[:2000], traceback=trace[-8000:])
            self._halt.wait(self._seconds)
