"""A run as the console reads it: as an observer, live or over, and only while somebody looks at it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from broker.connection import Connection
from broker.history import Histories
from broker.lookups import Stored, UnreadableAnswerError, look_up_all
from broker.subjects import Subjects
from broker.table import Cell
from relax_actors.console.lease_book import LeaseBook
from relax_actors.console.picture import Picture
from relax_actors.console.table_start import OlderCells, TableStart, find_start
from relax_actors.errors import BrokerError, BrokerUnreachableError, ConfigError, RelaxError
from relax_actors.monitoring.access import Access
from relax_actors.monitoring.connection import Observed, find, observed

if TYPE_CHECKING:
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
PAUSE_SECONDS = 0.25
"""Pause between two pages of what no view has asked for, so that it takes little of a core."""
IDLE_SECONDS = 30.0
"""Time after a person's last request, and after the whole run was read, after which a run that is over is closed."""


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
        self._read_from: Connection | None = None
        """Connection from which the picture is read."""
        self._table: Histories
        self._log: Histories
        self._table_sequence = 0
        self._older: OlderCells | None = None
        """Cells of the table that are not in the picture yet, because the first view does not need them."""
        self._older_lock = asyncio.Lock()
        self._reading_older: asyncio.Task[None] | None = None
        self._read = self._used = self._connected = float("-inf")

    @cached_property
    def rows(self) -> RowReader:
        """Reader of rows in the table and the record."""
        from relax_actors.monitoring.row_reader import RowReader  # noqa: PLC0415 imports tokenizers and media

        return RowReader(self.name, str(self.folder.root))

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
        self._read_from, self._read = None, float("-inf")
        if at.live:
            await self.within(at.connection, _subscribe(at.connection, self.book))
        return at.connection

    async def _begin(self, connection: Connection) -> None:
        """Begin to read the run: the log from its first message, and of the table what the first view needs."""
        stream, picture = self.subjects.table_stream, Picture(self.settings)
        read = connection.retry(partial(self._find_start, connection), f"read checkpoints of {stream}")
        start = await self.within(connection, read)
        if start is not None:
            picture.ledger.skip_batches(start.floor, start.trained)
            for cell in start.cells:
                picture.take_cell(cell)
        starts = None if start is None else start.sequences
        self._table = Histories(connection, stream, Picture.columns(self.subjects), starts)
        self._log = Histories(connection, self.subjects.log_stream, Picture.log_subjects(self.subjects))
        self._older = None if start is None else OlderCells(connection, stream, start)
        self.picture, self._read, self._table_sequence, self._read_from = picture, float("-inf"), 0, connection

    async def _find_start(self, connection: Connection) -> TableStart | None:
        try:
            return await find_start(connection, self.subjects)
        except UnreadableAnswerError:
            return None  # everything is read

    async def refresh(self, *, whole: bool = False) -> Picture:
        """Return the picture with what is new in the broker.

        Args:
            whole: whether batches and weights are needed that a checkpoint covers; of a long run, they are read later.

        Raises:
            ConfigError, BrokerError: as `connection`.
        """
        connection = await self.connection()
        async with self._lock:
            if time.monotonic() - self._read >= FRESH_SECONDS:
                while self._read_from is not connection or not await self._take_news(connection):
                    await self._begin(connection)
                self._read = time.monotonic()
                self._use()
            while whole and await self._take_older(connection):
                pass
            if self._older is not None and self._reading_older is None:
                self._reading_older = asyncio.create_task(self._read_older(connection))
            return self.picture

    async def _read_older(self, connection: Connection) -> None:
        """Read what the first view did not need, slowly."""
        goes_on = True
        try:
            with suppress(RelaxError):  # the next request reports the error
                while goes_on:
                    await asyncio.sleep(PAUSE_SECONDS)
                    goes_on = await self._take_older(connection)
        finally:
            self._reading_older = None

    async def _take_older(self, connection: Connection) -> bool:
        """Add a page of older cells to the picture; return False after the last page."""
        async with self._older_lock:
            older, picture = self._older, self.picture
            if older is None or connection is not self._read_from:
                return False
            cells = await self.within(connection, older.page())
            if older is not self._older:
                return False
            self._used = time.monotonic()  # closed before all is read, it would be read from the start the next time
            for cell in cells:
                picture.take_cell(cell)
            if not cells:
                picture.ledger.skip_batches(0, 0)
                self._older = None
            return bool(cells)

    async def read_ahead(self) -> None:
        """Read the run before anybody asks; the first request still reads what is new. Raises as `connection`."""
        await self.refresh()
        self._read = float("-inf")

    async def _take_news(self, connection: Connection) -> bool:
        """Add what is new to the picture; return False if a stream was created again, as by `relax up --fresh`."""
        picture = self.picture
        sequence = await self._take(connection, self._log, picture.log_sequence, picture.take_message)
        if sequence is None:
            return False
        sequence = await self._take(connection, self._table, self._table_sequence, picture.take_cell)
        self._table_sequence = sequence or 0
        return sequence is not None

    async def _take(
        self, connection: Connection, history: Histories, known: int, take: Callable[[Cell], None]
    ) -> int | None:
        """Take what is new after a sequence; return the newest sequence, or None if it begins again."""
        goes_on = True
        while goes_on:
            cells = await self.within(connection, history.news())
            if cells and cells[0].sequence <= known:
                return None
            for cell in cells:
                take(cell)
            known = cells[-1].sequence if cells else known
            goes_on = history.has_more
        return known

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
        held, self._held, self._at, self._older = self._held, None, None, None
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
