"""Watch a run in the process of its root: show progress, and stop the root at the end."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace

import structlog
from rich.console import Console
from rich.live import Live

from broker.connection import Connection
from broker.leases import RunState
from broker.ordered_consumer import OrderedConsumer
from broker.store import Store
from broker.streams import ensure_bucket, wait_for_stream
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.config import Config
from relax_actors.errors import CodecError, RelaxError
from relax_actors.messages import Checkpoint, Evaluation
from relax_actors.monitoring.live_view import Progress
from relax_actors.monitoring.phases import Phases, process_start
from relax_actors.monitoring.summary import Curves, Summary, summarise
from relax_actors.roles.permissions import OPERATOR
from relax_actors.runtime.journal import Journal
from relax_actors.supervision.root import Root
from relax_actors.supervision.streams import publish_run

log = structlog.get_logger()
POLL_SECONDS = 0.25
LINE_SECONDS = 5.0
CHECK_SECONDS = 2.0
"""Between two checks whether the run is finished."""
WAIT_SECONDS = 60.0
AWAY_SECONDS = 3.0
"""Silence of the broker after which it is shown."""


class Watcher(threading.Thread):
    """Thread that watches a run beside its root, and stops the root when the run is finished.

    Args:
        root: root of the run.
        console: where progress is shown.
        live: show a live view.
        lines: without a live view, print a line every `LINE_SECONDS`.
    """

    def __init__(self, root: Root, console: Console, *, live: bool, lines: bool) -> None:
        super().__init__(name="watcher", daemon=True)
        self.progress = Progress(root.config.run.name, root.config.run.steps)
        self.finished = False
        self.result: tuple[Summary, Curves] | None = None
        """Result and reward curves; None until the run is finished."""
        self.halt = threading.Event()
        """Set it to end the thread."""
        self._phases = Phases(process_start(), root.actors)
        self._connected = time.monotonic()
        self._root, self._console, self._live, self._lines = root, console, live, lines

    def run(self) -> None:
        """Watch until the run is finished or `halt` is set; after any error, connect again."""
        while not self.halt.is_set() and not self.finished:
            connection: Connection | None = None
            try:
                connection = Connection(self._root.address.for_user(OPERATOR), "watcher", deadline=WAIT_SECONDS)
                self._watch(connection)
            except Exception as error:  # noqa: BLE001 without this thread the run would never end
                log.warning("watcher_failed", error=f"{type(error).__name__}: {error}")
                self.halt.wait(1.0)
            finally:
                if connection is not None:
                    connection.close()
        if self.finished:
            self._root.tree.stop()

    def _watch(self, connection: Connection) -> None:
        config = self._root.config
        subjects = Subjects(config.run.name)
        table = Table(connection, subjects, Store(config.store_path), "watcher", direct=config.broker.replicas == 1)
        connection.call(wait_for_stream(connection, subjects.log_stream, WAIT_SECONDS), WAIT_SECONDS + 1)
        journal = Journal(connection, subjects, "run", 0)
        self.progress = Progress(config.run.name, config.run.steps)
        following = connection.submit(self._follow(connection, subjects))
        display = Live(self.progress, console=self._console, refresh_per_second=4) if self._live else None
        printed = checked = time.monotonic()
        check: _FinishCheck | None = None
        with display or contextlib.nullcontext():
            while not self.halt.wait(POLL_SECONDS) and not self.finished:
                if following.done():
                    following.result()
                now = time.monotonic()
                self._update_notice(connection, now)
                if display:
                    display.update(self.progress)
                elif self._lines and now - printed > LINE_SECONDS:
                    self._console.print(self.progress.line(), highlight=False)
                    printed = now
                # The table decides, not the metrics: a metric may be lost.
                if check is None and (self.progress.step >= config.run.steps or now - checked > CHECK_SECONDS):
                    checked = now
                    journal.metric({"kind": "run", "steps": config.run.steps})
                    check = _FinishCheck(table, config)
                    check.start()
                if check is not None and not check.is_alive():
                    if check.finished:
                        self._finish(connection, table)
                    check = None
        following.cancel()

    def _finish(self, connection: Connection, table: Table) -> None:
        """Read the result, and publish that the run is finished, so that other nodes end too."""
        config, subjects = self._root.config, table.subjects
        phases, restarts = self._phases, self.progress.restarts
        summary, curves = summarise(table, config, seconds=phases.seconds, restarts=restarts)
        ready, first_step = phases.seconds_to_ready, phases.seconds_to_first_step
        self.result = replace(summary, seconds_to_ready=ready, seconds_to_first_step=first_step), curves
        bucket = connection.call(ensure_bucket(connection, subjects, config.broker.replicas), CHECK_SECONDS)
        publication = publish_run(RunState(connection, bucket), config, self._root.import_path, finished=True)
        connection.call(publication, CHECK_SECONDS)
        Journal(connection, subjects, "run", 0).event("finished", steps=config.run.steps)
        self.finished = True

    def _update_notice(self, connection: Connection, now: float) -> None:
        """Show what the whole run waits for, if it does."""
        if connection.nc.is_connected:
            self._connected = now
        away = now - self._connected
        broker = f"broker {connection.address.url} has not answered for {away:.0f} s" if away > AWAY_SECONDS else ""
        self.progress.notice = self._root.notice or broker

    async def _follow(self, connection: Connection, subjects: Subjects) -> None:
        follower = OrderedConsumer(connection, subjects.log_stream, subjects.log_subjects())
        async for messages in follower.batches():
            for message in messages:
                self.progress.take(message.subject, message.data)
                self._phases.take(message.subject, message.data)


class _FinishCheck(threading.Thread):
    """Thread that asks the table whether the run is finished.

    The watcher itself must not block while the broker does not answer: it reports that the broker does not answer.
    """

    def __init__(self, table: Table, config: Config) -> None:
        super().__init__(name="finish check", daemon=True)
        self.finished = False
        self._table, self._config = table, config

    def run(self) -> None:
        """Ask once; an error counts as no."""
        with contextlib.suppress(RelaxError):
            self.finished = _is_finished(self._table, self._config)


def _is_finished(table: Table, config: Config) -> bool:
    """Whether the last checkpoint is published and the last version evaluated."""
    steps = config.run.steps
    last = table.fetch_last("checkpoint", Checkpoint)
    if last is None or last.version < steps:
        return False
    if config.eval is None:
        return True
    with contextlib.suppress(CodecError):
        return table.fetch(table.subjects.numbered("evaluation", steps), Evaluation) is not None
    return False
