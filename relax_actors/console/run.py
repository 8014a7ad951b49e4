"""A run as the console reads it: as an observer, live or over, and only while somebody looks at it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from broker.connection import Connection
from broker.history import Histories
from broker.lookups import Stored, UnreadableAnswerError, look_up_all
from broker.subjects import Subjects
from relax_actors.console.lease_book import LeaseBook
from relax_actors.console.picture import Picture
from relax_actors.errors import BrokerError, BrokerUnreachableError, ConfigError
from relax_actors.monitoring.access import Access
from relax_actors.monitoring.connection import Observed, find, observed
from relax_actors.monitoring.row_reader import RowReader

T = TypeVar("T")
STARTS: ContextVar[bool] = ContextVar("STARTS", default=True)
"""Whether the present request may start the broker of a run that is over: a person asked for it, not an open page."""
FRESH_SECONDS = 0.5
"""Age up to which the picture is not read again."""
ANSWER_SECONDS = 60.0
"""Time for reading what is new; the first time of a long run takes longest."""
LOST_SECONDS = 3.0
"""Time without a connection after which requests are answered with an error."""
IDLE_SECONDS = 30.0
"""Time without a person's request after which the connection to a run that is over is closed, for others to use it."""


class ConsoleRun:
    """One run. All coroutines run in one event loop.

    A run that is over has no broker: the connection starts one and holds the folder of the run meanwhile.

    Args:
        run: name or folder of the run.
        access: options that replace the recorded address and credentials of its broker.

    Raises:
        ConfigError: no such run.
    """

    def __init__(self, run: str, access: Access | None = None) -> None:
        self.folder = find(run)
        self.settings = self.folder.load_settings()
        self.name: str = self.settings.run.name
        self.subjects = Subjects(self.name)
        self.access = access or Access()
        self.picture = Picture(self.settings)
        self.rows = RowReader(self.name, str(self.folder.root))
        self.book = LeaseBook(self.subjects)
        self.live = False
        """Whether the broker was up before the console connected."""
        # The broker of a run that is over ends with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"run-{self.name}")
        self._lock = asyncio.Lock()
        self.timeline = asyncio.Lock()
        """Held while a timeline is made, which takes a core: one at a time."""
        self._held: AbstractContextManager[Observed] | None = None
        self._at: Observed | None = None
        self._table: Histories
        self._log: Histories
        self._read = self._used = self._connected = float("-inf")

    async def connection(self) -> Connection:
        """Return the open connection; open it if there is none, or if the broker has ended with its run.

        Raises:
            NotUpError: the run is over, and this request may not start its broker; see `STARTS`.
            ConfigError: the run cannot be opened.
            BrokerError: its broker does not answer.
        """
        async with self._lock:
            self._use()
            at = self._at
            if at is not None and not at.connection.nc.is_connected:
                if await self._in_thread(at.is_over):
                    await self._close()
                    at = None
                elif time.monotonic() - self._connected > LOST_SECONDS:
                    raise self._no_answer(at.connection)
            else:
                self._connected = time.monotonic()
            return at.connection if at is not None else await self._open()

    async def _open(self) -> Connection:
        held = observed(str(self.folder.root), self.access, start=STARTS.get())
        at = await self._in_thread(held.__enter__)
        self._held, self._at, self.live = held, at, at.live
        self.settings = self.folder.load_settings()
        self._connected = time.monotonic()
        self._begin(at.connection)
        if at.live:
            await self.within(at.connection, _subscribe(at.connection, self.book))
        return at.connection

    def _begin(self, connection: Connection) -> None:
        """Begin to read the run from its first message."""
        self.picture, self._read = Picture(self.settings), float("-inf")
        self._table = Histories(connection, self.subjects.table_stream, Picture.columns(self.subjects))
        self._log = Histories(connection, self.subjects.log_stream, Picture.log_subjects(self.subjects))

    async def refresh(self) -> Picture:
        """Return the picture with what is new in the broker; raises as `connection`."""
        connection = await self.connection()
        async with self._lock:
            if time.monotonic() - self._read < FRESH_SECONDS:
                return self.picture
            while not await self._take_news(connection):
                self._begin(connection)
            self._read = time.monotonic()
            self._use()
            return self.picture

    async def read_ahead(self) -> None:
        """Read the run before anybody asks; the first request still reads what is new. Raises as `connection`."""
        await self.refresh()
        self._read = float("-inf")

    async def _take_news(self, connection: Connection) -> bool:
        """Add what is new to the picture; return False if a stream was created again, as by `relax up --fresh`."""
        picture = self.picture
        for history, first, take in (
            (self._log, picture.log_sequence, picture.take_message),
            (self._table, picture.table_sequence, picture.take_cell),
        ):
            known, goes_on = first, True
            while goes_on:
                cells = await self.within(connection, history.news())
                if cells and cells[0].sequence <= known:
                    return False
                for cell in cells:
                    take(cell)
                known = cells[-1].sequence if cells else known
                goes_on = history.has_more
        return True

    async def last_metrics(self, actors: list[str]) -> dict[str, bytes]:
        """Return the newest metric of each actor by its name, read in one request; without actors that have none."""
        connection = await self.connection()
        subjects = {self.subjects.metric(*actor.rpartition(".")[::2]): actor for actor in actors}

        async def read() -> dict[str, Stored]:
            try:
                return await look_up_all(connection.requests, self.subjects.log_stream, list(subjects))
            except UnreadableAnswerError as error:
                msg = f"broker {connection.address.url} refuses to read {self.subjects.log_stream}: {error}"
                raise BrokerError(msg) from error

        request = connection.retry(read, f"read metrics of {self.subjects.log_stream}")
        return {subjects[subject]: stored.data for subject, stored in (await self.within(connection, request)).items()}

    async def within(self, connection: Connection, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a connection's loop; raises BrokerUnreachableError after `ANSWER_SECONDS`."""
        future = asyncio.wrap_future(connection.submit(work))
        end = time.monotonic() + ANSWER_SECONDS
        try:
            while not (await asyncio.wait({future}, timeout=1.0))[0]:
                now = self._used = time.monotonic()
                if connection.nc.is_connected:
                    self._connected = now
                if now > end or now - self._connected > LOST_SECONDS:
                    raise self._no_answer(connection)
            return future.result()
        finally:
            future.cancel()

    def _no_answer(self, connection: Connection) -> BrokerUnreachableError:
        msg = (
            f"the broker {connection.address.url} of run {self.name} does not answer; the page goes on when it does. "
            "`relax up` restarts the broker of its run"
        )
        return BrokerUnreachableError(msg)

    def _use(self) -> None:
        """Keep the connection open, unless the present request is one of an open page by itself."""
        if STARTS.get():
            self._used = time.monotonic()

    async def release_if_idle(self) -> None:
        """Close the connection to a run that is over if nobody has looked at it for a while."""
        async with self._lock:
            if self._at is not None and not self.live and time.monotonic() - self._used >= IDLE_SECONDS:
                await self._close()

    async def close(self) -> None:
        """Close the connection."""
        async with self._lock:
            await self._close()
        self._thread.shutdown(wait=False)

    async def _close(self) -> None:
        held, self._held, self._at = self._held, None, None
        self.book = LeaseBook(self.subjects)
        if held is not None:
            await self._in_thread(lambda: held.__exit__(None, None, None))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def _subscribe(connection: Connection, book: LeaseBook) -> None:
    await connection.nc.subscribe(book.subject, cb=book.take)


def runs_beside(folder: str) -> list[str]:
    """Return the folders of the runs in a folder, the newest first."""
    paths = []
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        try:
            paths.append((find(str(path)).config.stat().st_mtime, str(path)))
        except (ConfigError, OSError):
            continue
    return [path for _, path in sorted(paths, reverse=True)]
