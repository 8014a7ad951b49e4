"""Terminal view of a live run, fed by the events and metrics on its broker.

Subscribes only, as an observer, and writes nothing to the broker.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from typing import Self

from nats.aio.msg import Msg
from rich.live import Live

from broker.address import Address
from broker.connection import Connection
from broker.subjects import Subjects
from relax_actors.monitoring.live_view import LiveView
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.progress import Progress
from relax_actors.monitoring.screen import Screen
from relax_actors.monitoring.sinks import Sink
from relax_actors.runtime import logs
from relax_actors.runtime.journal import MAX_BYTES

LINE_SECONDS = 5.0
DRAW_SECONDS = 0.25
REACH_SECONDS = 30.0
MAX_BACKLOG = 10_000
"""Messages kept while the view or a sink is busy; later ones are discarded."""


def watch(run: str, address: Address, sinks: list[Sink], *, count: int = 0) -> None:
    """Show a run until its end, a signal, or after `count` messages, if not 0.

    The sinks receive every message, too, and are closed at the end.
    """
    logs.configure()
    console = Screen()
    progress = Progress(run, 0)
    halt = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: halt.set())
    received: queue.SimpleQueue[Msg] = queue.SimpleQueue()
    connection = Connection(address, "monitor", deadline=REACH_SECONDS)

    async def subscribe() -> None:
        arrivals = Arrivals()

        async def on_message(message: Msg) -> None:
            if received.qsize() < MAX_BACKLOG and len(message.data) <= MAX_BYTES and arrivals.is_next(message):
                received.put(message)

        for subject in Subjects(run).log_subjects():
            await connection.nc.subscribe(subject, cb=on_message)

    taken = 0
    try:
        connection.call(subscribe(), REACH_SECONDS)
        with _Display(console, progress) as display:
            while not (halt.is_set() or progress.finished or (count and taken >= count)):
                taken += _process(received, progress, sinks)
                display.update()
    finally:
        for sink in sinks:
            sink.close()
        connection.close()


class Arrivals:
    """Tells messages that the log has just stored from answers of the server that imitate them.

    The observers of a run share an account: one of them can have the server send it a stored message on any subject of
    that account, and the others receive it. The server names subject and sequence of what it sends in the headers.
    """

    def __init__(self) -> None:
        self._last = 0

    def is_next(self, message: Msg) -> bool:
        """Whether a message was stored on its subject, after all those before it."""
        headers = message.headers or {}
        if "Nats-Stream" not in headers:  # published in the account of the streams, where only the operator listens
            return True
        sequence = headers.get("Nats-Sequence", "")
        if headers.get("Nats-Subject") != message.subject or not sequence.isdecimal() or int(sequence) <= self._last:
            return False
        self._last = int(sequence)
        return True


class _Display:
    """Live view on a terminal; elsewhere a plain line every `LINE_SECONDS`, and one at the end."""

    def __init__(self, console: Screen, progress: Progress) -> None:
        self._console, self._progress = console, progress
        self._live = Live(LiveView(progress), console=console, refresh_per_second=4) if console.is_terminal else None
        self._printed = time.monotonic() - LINE_SECONDS

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        else:
            self._print_failures(float("inf"))
            self._print("; finished" if self._progress.finished else "")

    def update(self) -> None:
        """Redraw the live view, or print a line if the last one is old."""
        if self._live is not None:
            self._live.refresh()
            return
        self._print_failures(time.monotonic())
        if time.monotonic() - self._printed > LINE_SECONDS:
            self._print()
            self._printed = time.monotonic()

    def _print_failures(self, now: float) -> None:
        for line in self._progress.lines(now):
            self._console.show(line)

    def _print(self, suffix: str = "") -> None:
        self._console.show(self._progress.line() + suffix)


def _process(received: queue.SimpleQueue[Msg], progress: Progress, sinks: list[Sink]) -> int:
    """Pass on the messages of the next `DRAW_SECONDS`; return how many there were."""
    end, taken = time.monotonic() + DRAW_SECONDS, 0
    while (left := end - time.monotonic()) > 0:
        try:
            message = received.get(timeout=left)
        except queue.Empty:
            break
        taken += 1
        if (parsed := LogMessage.parse(message.subject, message.data)) is None:
            continue
        progress.take(parsed)
        for sink in [] if parsed.claim else sinks:
            sink.take(parsed)
    return taken
