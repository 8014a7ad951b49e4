"""`relax monitor`: a run as its events and metrics tell it, heard through the broker alone; nothing is written there.

Credentials of an observer are enough, and all that it uses.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from pathlib import Path
from typing import Self

from nats.aio.msg import Msg
from rich.console import Console
from rich.live import Live

from broker.address import Address
from broker.connection import Connection
from broker.credentials import read_claims
from broker.subjects import Subjects, check_name
from relax_actors.errors import ConfigError
from relax_actors.monitoring.connection import find
from relax_actors.monitoring.live_view import Progress
from relax_actors.monitoring.sinks import Heard, Sink
from relax_actors.roles.permissions import OBSERVER
from relax_actors.runtime import logs
from relax_actors.supervision.root import address_of

LINE_SECONDS = 5.0
DRAW_SECONDS = 0.25
REACH_SECONDS = 30.0
BACKLOG = 10_000


def locate(run: str | None, url: str | None, credentials: Path | None, ca: Path | None) -> tuple[str, Address]:
    """Name and broker of a run: that of a folder here, or one anywhere.

    Raises:
        ConfigError: neither is said, or not which run.
    """
    if url is None:
        if run is None:
            msg = "say which run, or its broker: relax monitor RUN, or --broker nats://host:port"
            raise ConfigError(msg)
        folder = find(run)
        return folder.load_config().run.name, Address.load(folder.address).for_user(OBSERVER)
    address = address_of(url, credentials, ca).for_user(OBSERVER)
    name = run or (read_claims(Path(address.credentials)).name.partition(".")[0] if address.credentials else None)
    if name is None:
        msg = "say which run of this broker: relax monitor RUN --broker ..., or --credentials of its own"
        raise ConfigError(msg)
    return check_name(name, "run name"), address


def monitor(run: str, address: Address, sinks: list[Sink], *, count: int = 0) -> None:
    """Show a run until it is over, as `relax up` tells it, or until interrupted; after `count` messages if not 0."""
    logs.configure()
    console = Console()
    progress = Progress(run, 0)
    halt = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: halt.set())
    heard: queue.SimpleQueue[Msg] = queue.SimpleQueue()
    connection = Connection(address, "monitor", deadline=REACH_SECONDS)

    async def listen() -> None:
        async def on_message(message: Msg) -> None:
            if heard.qsize() < BACKLOG:
                heard.put(message)

        for subject in Subjects(run).log_subjects():
            await connection.nc.subscribe(subject, cb=on_message)

    taken = 0
    try:
        connection.call(listen(), REACH_SECONDS)
        with _Shown(console, progress) as shown:
            while not (halt.is_set() or progress.finished or (count and taken >= count)):
                taken += _take(heard, progress, sinks)
                shown.update()
    finally:
        for sink in sinks:
            sink.close()
        connection.close()


class _Shown:
    """The live view on a terminal; elsewhere a plain line now and then, and one at the end."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console, self._progress = console, progress
        self._live = Live(progress, console=console, refresh_per_second=4) if console.is_terminal else None
        self._spoke = time.monotonic() - LINE_SECONDS

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        else:
            self._say("; finished" if self._progress.finished else "")

    def update(self) -> None:
        """Show what is known now."""
        if self._live is not None:
            self._live.update(self._progress)
        elif time.monotonic() - self._spoke > LINE_SECONDS:
            self._say()
            self._spoke = time.monotonic()

    def _say(self, more: str = "") -> None:
        self._console.print(self._progress.line() + more, highlight=False, soft_wrap=True)


def _take(heard: queue.SimpleQueue[Msg], progress: Progress, sinks: list[Sink]) -> int:
    """Take in what came within a moment; gives how much."""
    end, taken = time.monotonic() + DRAW_SECONDS, 0
    while (left := end - time.monotonic()) > 0:
        try:
            message = heard.get(timeout=left)
        except queue.Empty:
            break
        taken += 1
        progress.take(message.subject, message.data)
        if (read := Heard.read(message.subject, message.data)) is not None:
            for sink in sinks:
                sink.take(read)
    return taken
