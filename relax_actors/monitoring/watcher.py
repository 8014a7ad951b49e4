"""Watch a run in the process of its root: show progress, and stop the root at the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection
from dataclasses import replace

import nats.errors
import structlog
from rich.live import Live

from broker.connection import Connection
from broker.leases import RunState
from broker.ordered_consumer import OrderedConsumer
from broker.permissions import OPERATOR
from broker.store import Store
from broker.streams import open_bucket, wait_for_stream
from broker.subjects import Subjects
from broker.table import CALL_DEADLINE, Table
from relax_actors.config import Config
from relax_actors.errors import BrokerError, CodecError, RelaxError
from relax_actors.isolation.proc import TICKS, process
from relax_actors.messages import Checkpoint, Evaluation
from relax_actors.monitoring.leases import run_waits_for
from relax_actors.monitoring.live_view import LiveView
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.progress import Progress
from relax_actors.monitoring.screen import Screen
from relax_actors.monitoring.summary import Curves, Summary, summarise
from relax_actors.printable import printable
from relax_actors.runtime.journal import Journal
from relax_actors.supervision.absence import RoleAbsence, needed_roles, present_roles
from relax_actors.supervision.root import Root
from relax_actors.supervision.spec import Failure
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

    It shows a live view, or, with `lines`, prints a line every `LINE_SECONDS`.
    """

    def __init__(self, root: Root, console: Screen, *, live: bool, lines: bool) -> None:
        super().__init__(name="watcher", daemon=True)
        self.progress = Progress(root.config.run.name, root.config.run.steps)
        self.finished = False
        self.result: tuple[Summary, Curves] | None = None
        """Result and reward curves; None until the run is finished."""
        self.failure: Failure | None = None
        """Why the run cannot continue, if it cannot for a reason outside this machine."""
        self.halt = threading.Event()
        """Set it to end the thread."""
        self._phases = Phases(process_start(), root.actors)
        self._connected = time.monotonic()
        self._root, self._console, self._live, self._lines = root, console, live, lines
        # Newest message of the log before this `relax up`; failures up to it were reported by earlier ones.
        self._history: int | None = None
        self._absence = RoleAbsence(needed_roles(root.config), root.config.supervision.patience)

    def run(self) -> None:
        """Watch until the run is finished or `halt` is set; after any error, connect again."""
        while not self.halt.is_set() and not self.finished and self.failure is None:
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
        if self.finished or self.failure is not None:
            self._root.tree.stop()

    def _watch(self, connection: Connection) -> None:
        config = self._root.config
        subjects = Subjects(config.run.name)
        table = Table(connection, subjects, Store(config.store_path), "watcher", direct=config.broker.replicas == 1)
        connection.call(wait_for_stream(connection, subjects.log_stream, WAIT_SECONDS), WAIT_SECONDS + 1)
        journal = Journal(connection, subjects, "run", 0)
        self.progress = Progress(config.run.name, config.run.steps)
        if self._history is None:
            info = connection.call(connection.js.stream_info(subjects.log_stream), WAIT_SECONDS)
            self._history = info.state.last_seq
        following = connection.submit(self._follow(connection, subjects))
        display = Live(LiveView(self.progress), console=self._console, refresh_per_second=4) if self._live else None
        printed = checked = time.monotonic()
        bucket = connection.call(open_bucket(connection, subjects, WAIT_SECONDS), WAIT_SECONDS + 1)
        state, check = RunState(connection, bucket), None
        with display or contextlib.nullcontext():
            while not self.halt.wait(POLL_SECONDS) and not self.finished and self.failure is None:
                if following.done():
                    following.result()
                now = time.monotonic()
                self._update_notice(connection, now)
                self._check_sign_in(connection)
                if self._lines and not display:
                    printed = self._print(now, printed)
                # The table decides, not the metrics: a metric may be lost.
                if check is None and (self.progress.step >= config.run.steps or now - checked > CHECK_SECONDS):
                    checked = now
                    journal.metric({"kind": "run", "steps": config.run.steps})
                    check = _Check(table, config, state)
                    check.start()
                if check is not None and not check.is_alive():
                    self._conclude(check, now)
                    check = None
        if self._lines and not self._live:
            self._print_failures(float("inf"))
        following.cancel()

    def _conclude(self, check: _Check, now: float) -> None:
        """End the run if it is finished, or if a role has had no actor for too long."""
        if check.finished:
            self._finish(check.state, check.table)
            return
        self.progress.waits = check.waits
        if check.present is not None:
            self._absence.observe(check.present, now)
        if (overdue := self._absence.overdue) is not None:
            self.failure = Failure(*overdue, "")

    def _print(self, now: float, printed: float) -> float:
        """Print new failures, or progress if it is old; return when that was printed."""
        self._print_failures(now)
        if now - printed <= LINE_SECONDS:
            return printed
        self._console.show(self.progress.line())
        return now

    def _print_failures(self, now: float) -> None:
        for line in self.progress.lines(now):
            self._console.show(line)

    def _finish(self, state: RunState, table: Table) -> None:
        """Read the result, and publish that the run is finished, so that other nodes end too."""
        config, connection = self._root.config, table.connection
        phases, restarts = self._phases, self.progress.restarts
        summary, curves = summarise(table, config, seconds=phases.seconds, restarts=restarts)
        ready, first_step = phases.seconds_to_ready, phases.seconds_to_first_step
        self.result = replace(summary, seconds_to_ready=ready, seconds_to_first_step=first_step), curves
        connection.call(publish_run(state, config, self._root.import_path, finished=True), CHECK_SECONDS)
        Journal(connection, table.subjects, "run", 0).event("finished", steps=config.run.steps)
        self.finished = True

    def _update_notice(self, connection: Connection, now: float) -> None:
        """Show what the whole run waits for, if it does."""
        if connection.nc.is_connected:
            self._connected = now
        away = now - self._connected
        silent = f"broker {connection.address.url} has not answered for {away:.0f} s" if away > AWAY_SECONDS else ""
        self.progress.notice = self._root.notice or connection.refusal or silent or self._absence.notice

    def _check_sign_in(self, connection: Connection) -> None:
        """End the run if the broker has refused the operator's credentials for too long."""
        try:
            connection.check_sign_in()
        except BrokerError as error:
            self.failure = Failure("run", str(error), "")

    async def _follow(self, connection: Connection, subjects: Subjects) -> None:
        follower = OrderedConsumer(connection, subjects.log_stream, subjects.log_subjects())
        async for messages in follower.batches():
            for message in messages:
                sequence = message.metadata.sequence
                recent = sequence is None or sequence.stream > (self._history or 0)
                if (parsed := LogMessage.parse(message.subject, message.data)) is not None:
                    self._take(parsed, recent=recent)

    def _take(self, message: LogMessage, *, recent: bool) -> None:
        """Update the views; stop if all first rows failed in an actor of any node."""
        self.progress.take(message, recent=recent)
        self._phases.take(message)
        if recent and message.is_event and message.kind == "all_rows_failed" and not message.claim:
            error, trace = message.body.get("error"), message.body.get("traceback")
            self.failure = Failure(message.sender, printable(error), str(trace or ""))


class _Check(threading.Thread):
    """Thread that looks for the run's end, roles with actors, and what it waits for.

    The watcher itself must not block while the broker does not answer: it reports that the broker does not answer.
    """

    def __init__(self, table: Table, config: Config, state: RunState) -> None:
        super().__init__(name="check", daemon=True)
        self.finished = False
        self.present: set[str] | None = None
        """Roles with an actor; None if the broker did not tell."""
        self.waits = ""
        """What the run waits for if it makes no step."""
        self.table, self.state, self._config = table, state, config

    def run(self) -> None:
        """Ask once; an error counts as no answer."""
        # The connection may be closed meanwhile, at the end of the run.
        with contextlib.suppress(RelaxError, nats.errors.Error):
            self.finished = _is_finished(self.table, self._config)
            call = self.table.connection.call
            nodes = call(self.state.leases("node"), CALL_DEADLINE)
            self.present = present_roles(nodes.values())
            role = "trainer" if self._config.run.steps or self._config.eval is None else "evaluator"
            leases = call(self.state.leases(role), CALL_DEADLINE)
            self.waits = run_waits_for(nodes, leases.get(f"{role}.0"), role)


def _is_finished(table: Table, config: Config) -> bool:
    """Whether the last checkpoints are published and the last version is evaluated."""
    steps = config.run.steps
    for kind in ("checkpoint",) if config.critic is None else ("checkpoint", "critic_checkpoint"):
        last = table.fetch_last(kind, Checkpoint)
        if last is None or last.version < steps:
            return False
    if config.eval is None:
        return True
    with contextlib.suppress(CodecError):
        return table.fetch(table.subjects.numbered("evaluation", steps), Evaluation) is not None
    return False


def process_start() -> float:
    """Return when this process started, in Unix seconds, before its imports."""
    own = process()
    age = 0.0 if own is None else time.clock_gettime(time.CLOCK_BOOTTIME) - own.start / TICKS
    return time.time() - age


class Phases:
    """Times of the phases, from the events and metrics of the run since the Unix time `began`."""

    def __init__(self, began: float, actors: Collection[str]) -> None:
        self._began, self._starting = began, set(actors)
        self._ready = 0.0
        self._first_step: float | None = None

    def take(self, message: LogMessage) -> None:
        """Record `ready` or a metric of the trainer; ignores other messages."""
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
