"""`relax up`: start or resume a run, show it, end it in order, and say what it came to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.live import Live
from rich.table import Table as RichTable

from broker.address import Address
from broker.connection import Connection
from broker.files import write_private
from broker.leases import RunState
from broker.ordered_consumer import OrderedConsumer
from broker.store import Store
from broker.streams import ensure_bucket, wait_for_stream
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.cli.check import require
from relax_actors.cli.summary import Curves, Summary, draw, summarise
from relax_actors.config import Config, load_config
from relax_actors.errors import CodecError, RelaxError
from relax_actors.messages import Checkpoint, Evaluation
from relax_actors.monitoring.live_view import Progress
from relax_actors.roles.permissions import OPERATOR
from relax_actors.runtime import logs
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.root import Root
from relax_actors.supervision.spec import Failure
from relax_actors.supervision.streams import publish_run

log = structlog.get_logger()
POLL_SECONDS = 0.25
LINE_SECONDS = 5.0
ASK_SECONDS = 2.0
WAIT_SECONDS = 60.0
AWAY_SECONDS = 3.0


class Watcher(threading.Thread):
    """Listens to a run beside its root, and stops it when it is finished."""

    def __init__(self, root: Root, console: Console, *, live: bool, lines: bool) -> None:
        super().__init__(name="watcher", daemon=True)
        self.progress = Progress(root.config.run.name, root.config.run.steps)
        self.finished = False
        self.result: tuple[Summary, Curves] | None = None
        self.first_step_after: float | None = None
        self.began = time.monotonic()
        self.halt = threading.Event()
        self._connected = time.monotonic()
        self._root, self._console, self._live, self._lines = root, console, live, lines

    def run(self) -> None:
        """Watch until the run is finished or halted; whatever goes wrong in between, watching begins again."""
        while not self.halt.is_set() and not self.finished:
            connection: Connection | None = None
            try:
                connection = Connection(self._root.address.for_user(OPERATOR), "watcher", deadline=WAIT_SECONDS)
                self._watch(connection)
            except Exception as error:  # noqa: BLE001 nobody else would see that the run is finished
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
        spoke = asked = time.monotonic()
        # Asked in a thread of its own: while the broker is away there is no answer, and this one says so.
        asking: _Asking | None = None
        with display or contextlib.nullcontext():
            while not self.halt.wait(POLL_SECONDS) and not self.finished:
                if following.done():
                    following.result()
                now = time.monotonic()
                self._notice(connection, now)
                if display:
                    display.update(self.progress)
                elif self._lines and now - spoke > LINE_SECONDS:
                    self._console.print(self.progress.line(), highlight=False)
                    spoke = now
                if self.progress.step and self.first_step_after is None:
                    self.first_step_after = round(now - self.began, 2)
                # What the table says counts, not what was heard: a metric may be lost.
                if asking is None and (self.progress.step >= config.run.steps or now - asked > ASK_SECONDS):
                    asked = now
                    journal.metric({"kind": "run", "steps": config.run.steps})
                    asking = _Asking(table, config)
                    asking.start()
                if asking is not None and not asking.is_alive():
                    if asking.answer:
                        self.result = summarise(
                            table, config, seconds=now - self.began, restarts=self.progress.restarts
                        )
                        self._tell_all(connection)
                        self.finished = True
                    asking = None
        following.cancel()

    def _tell_all(self, connection: Connection) -> None:
        """Let the nodes elsewhere end too."""
        config = self._root.config
        bucket = connection.call(
            ensure_bucket(connection, Subjects(config.run.name), config.broker.replicas), ASK_SECONDS
        )
        told = publish_run(RunState(connection, bucket), config, self._root.import_path, finished=True)
        connection.call(told, ASK_SECONDS)
        Journal(connection, Subjects(config.run.name), "run", 0).event("finished", steps=config.run.steps)

    def _notice(self, connection: Connection, now: float) -> None:
        """Say what the whole run waits for."""
        if connection.nc.is_connected:
            self._connected = now
        away = now - self._connected
        gone = f"broker {connection.address.url} does not answer since {away:.0f} s" if away > AWAY_SECONDS else ""
        self.progress.notice = self._root.notice or gone

    async def _follow(self, connection: Connection, subjects: Subjects) -> None:
        follower = OrderedConsumer(connection, subjects.log_stream, subjects.log_subjects())
        async for messages in follower.batches():
            for message in messages:
                self.progress.take(message.subject, message.data)


class _Asking(threading.Thread):
    """The question whether a run is finished, while it is being answered."""

    def __init__(self, table: Table, config: Config) -> None:
        super().__init__(name="asking", daemon=True)
        self.answer = False
        self._table, self._config = table, config

    def run(self) -> None:
        """Ask."""
        with contextlib.suppress(RelaxError):
            self.answer = _is_finished(self._table, self._config)


def _is_finished(table: Table, config: Config) -> bool:
    """Whether the last checkpoint is there and the last version evaluated."""
    steps = config.run.steps
    last = table.fetch_last("checkpoint", Checkpoint)
    if last is None or last.version < steps:
        return False
    if config.eval is None:
        return True
    with contextlib.suppress(CodecError):
        return table.fetch(table.subjects.numbered("evaluation", steps), Evaluation) is not None
    return False


def up(
    path: Path,
    settings: list[str],
    *,
    as_json: bool,
    quiet: bool,
    roles: list[str] | None = None,
    must_finish: bool = False,
) -> int:
    """The verb; gives the exit code."""
    logs.configure()
    console = Console(stderr=as_json)
    config = load_config(path, settings)
    folder = RunFolder(config.folder)
    if (done := _already_done(folder, config)) is not None:
        _show(console, done, folder, as_json=as_json)
        return 0
    require(config)
    root = Root(config, str(path.resolve().parent), roles)
    log_to(folder)
    live = console.is_terminal and not quiet
    watcher = Watcher(root, console, live=live, lines=not quiet)
    failure, interrupted = keep_up(root, watcher)
    if failure is not None:
        explain(console, failure, folder)
        return 1
    if watcher.result is None:
        where = f"step {watcher.progress.step} of {config.run.steps}"
        console.print(f"stopped at {where}; `relax up {path}` goes on from there", highlight=False, soft_wrap=True)
        return 0 if interrupted and not must_finish else 1
    summary = replace(watcher.result[0], seconds_to_first_step=watcher.first_step_after)
    draw(watcher.result[1], folder.reward_plot, f"{config.run.name}: reward by step")
    write_private(folder.summary, json.dumps(summary.json(), indent=1))
    _show(console, summary, folder, as_json=as_json)
    return 0


def keep_up(root: Root, watcher: Watcher) -> tuple[Failure | None, bool]:
    """Run until finished, given up or interrupted by a signal; gives the failure, and whether it was a signal."""
    interrupted = threading.Event()

    def on_signal(number: int, _frame: Any) -> None:
        if interrupted.is_set():
            # Asked twice: the children die with this process.
            os._exit(128 + number)
        interrupted.set()
        root.tree.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    watcher.start()
    failure = root.run()
    watcher.halt.set()
    watcher.join(5)
    return failure, interrupted.is_set()


def _already_done(folder: RunFolder, config: Config) -> Summary | None:
    if not folder.summary.exists():
        return None
    summary = Summary(**json.loads(folder.summary.read_text()))
    return summary if summary.steps >= config.run.steps else None


def log_to(folder: RunFolder) -> None:
    """Send what this process logs to a file: the terminal shows the run."""
    path = folder.log("root")
    path.parent.mkdir(parents=True, exist_ok=True)
    logs.rotate(path)
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(path.open("a", buffering=1)))


def explain(console: Console, failure: Failure, folder: RunFolder) -> None:
    """Say why a run could not be kept up."""
    console.print(f"[bold red]supervision gave up: {failure.role}[/]", highlight=False)
    console.print(failure.reason, highlight=False, markup=False, soft_wrap=True)
    if failure.traceback and failure.traceback != failure.reason:
        console.print(failure.traceback.strip(), highlight=False, markup=False, soft_wrap=True, style="dim")
    log = folder.log(failure.role)
    console.print(
        f"its log: {log}; mend the cause, then `relax up` again goes on", highlight=False, markup=False, soft_wrap=True
    )


def _show(console: Console, summary: Summary, folder: RunFolder, *, as_json: bool) -> None:
    table = RichTable(title=f"run {summary.run}", show_header=False)
    for name, value in summary.json().items():
        if value is not None and name != "run":
            table.add_row(name.replace("_", " "), str(round(value, 4) if isinstance(value, float) else value))
    table.add_row("reward curve", _short(folder.reward_plot))
    table.add_row("model", _short(folder.model))
    console.print(table)
    if as_json:
        sys.stdout.write(json.dumps(summary.json()) + "\n")
        sys.stdout.flush()


def _short(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


__all__ = ["Address", "up"]
