"""Reader of a run's durable table: look up, decode and list cells.

Invariant: until its row is purged, a subject holds at most one message, and the message never changes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from nats.js.api import RawStreamMsg
from nats.js.errors import NoStreamResponseError, NotFoundError

from broker.codec import Envelope, Resolver, decode_fields, open_envelope
from broker.connection import Connection
from broker.errors import CodecError, SubjectError
from broker.lookups import Stored, UnreadableAnswerError, look_up, look_up_all
from broker.ordered_consumer import OrderedConsumer
from broker.pull import delivery_of
from broker.store import Store
from broker.subjects import CellId, RowId, Subjects

T = TypeVar("T")
CALL_DEADLINE = 360.0
"""Deadline of the synchronous methods, in seconds; a write may spend most of it waiting for room."""
LIST_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Cell:
    """An encoded cell in the table."""

    subject: str
    sequence: int
    """Stream sequence of the message."""
    data: bytes
    stored: float = 0.0
    """Unix time in seconds, by the server's clock, at which the cell was stored; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Fill:
    """How full the table is."""

    last: int
    """Stream sequence of the last cell."""
    cells: int
    size: int
    """Size of the stream in bytes, and its limit."""
    max_size: int


class TableReader:
    """The cells of one run, to look up.

    Methods named `..._async` run in the connection's loop. The others may be called from any other thread, have a
    deadline of `CALL_DEADLINE` seconds and then raise `BrokerUnreachableError`. With `direct`, cells are looked up with
    `DIRECT.GET`, which any replica answers.
    """

    def __init__(self, connection: Connection, subjects: Subjects, store: Store, *, direct: bool = True) -> None:
        self.connection = connection
        self.subjects = subjects
        self.store = store
        self._direct = direct

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the connection's loop, within `CALL_DEADLINE`; see `Connection.call`."""
        return self.connection.call(work, CALL_DEADLINE)

    async def get_async(self, subject: str, *, direct: bool = True) -> Cell | None:
        """Return the last cell that a subject or filter matches, or None.

        `direct=False` asks the stream's leader, and any replica may answer otherwise.
        """
        stream = self.subjects.table_stream

        async def attempt() -> Cell | None:
            if direct and self._direct:
                with suppress(UnreadableAnswerError, NoStreamResponseError):
                    stored = await look_up(self.connection.requests, stream, subject)
                    return None if stored is None else Cell(*stored)
            with suppress(NotFoundError):
                message = await self.connection.js.get_last_msg(stream, subject)
                return Cell(message.subject or subject, message.seq or 0, message.data or b"")
            return None

        return await self.connection.retry(attempt, f"look up {subject}")

    def get(self, subject: str, *, direct: bool = True) -> Cell | None:
        """Return the cell at a subject, or None; see `get_async`."""
        return self.connection.call(self.get_async(subject, direct=direct), CALL_DEADLINE)

    def get_all(self, subjects: Iterable[str]) -> list[Cell | None]:
        """Look cells up in one request; results are in the order of `subjects`."""
        return self.call(self.get_all_async(list(subjects)))

    async def get_all_async(self, subjects: list[str]) -> list[Cell | None]:
        """Async variant of `get_all`."""

        async def attempt() -> dict[str, Stored]:
            with suppress(UnreadableAnswerError, NoStreamResponseError):
                return await look_up_all(self.connection.requests, self.subjects.table_stream, subjects)
            return {}

        known = await self.connection.retry(attempt, "look up cells") if self._direct and len(subjects) > 1 else {}
        others = [subject for subject in subjects if subject not in known]
        looked_up = dict(zip(others, await asyncio.gather(*map(self.get_async, others)), strict=True))
        return [Cell(*known[subject]) if subject in known else looked_up[subject] for subject in subjects]

    def read(self, data: bytes, expected: type[T], *, subject: str | None = None, resolve: Resolver | None = None) -> T:
        """Decode a cell, including its arrays in the store.

        Args:
            data: the encoded cell.
            expected: dataclass to decode into.
            subject: verify the checksum of a numbered cell with this subject. Required before acting on such a cell.
            resolve: `store.reader()` shared by cells that are read together; by default the cell has its own.

        Raises:
            CodecError: the cell is malformed or has another type.
            StoreError: an array in the store is missing or corrupt.
        """
        return decode_fields(open_envelope(data, resolve or self.store.reader(), subject=subject), expected)

    def read_envelope(self, data: bytes) -> Envelope:
        """Decode the envelope of a cell, including its arrays in the store; raises as `read`."""
        return open_envelope(data, self.store.reader())

    def fetch(self, subject: str, expected: type[T]) -> T | None:
        """Look a cell up and decode it; None if it does not exist. See `read` for the errors."""
        cell = self.get(subject)
        numbered = not self.subjects.parse(subject).field
        return None if cell is None else self.read(cell.data, expected, subject=subject if numbered else None)

    def fetch_last(self, kind: str, expected: type[T]) -> T | None:
        """Decode the last well-formed numbered cell of a kind; None if there is none."""
        return self.connection.call(self.fetch_last_async(kind, expected), CALL_DEADLINE)

    async def fetch_last_async(self, kind: str, expected: type[T]) -> T | None:
        """Async variant of `fetch_last`."""
        every = self.subjects.numbered(kind, "*")
        last = await self.get_async(every, direct=False)
        if last is None:
            return None
        with suppress(CodecError):
            return self.read(last.data, expected, subject=last.subject)
        numbers = [cell.step for cell in await self.list_cells_async(every)]
        for number in sorted(numbers, reverse=True):
            cell = await self.get_async(self.subjects.numbered(kind, number), direct=False)
            with suppress(CodecError):
                if cell is not None:
                    return self.read(cell.data, expected, subject=cell.subject)
        return None

    def fill(self) -> Fill:
        """Return how full the table is."""

        async def ask() -> Fill:
            info = await self.connection.js.stream_info(self.subjects.table_stream)
            return Fill(info.state.last_seq, info.state.messages, info.state.bytes, info.config.max_bytes or 0)

        return self.connection.call(self.connection.retry(ask, "look how full the table is"), CALL_DEADLINE)

    def numbered_kinds(self) -> list[str]:
        """Return the kinds of numbered cells that the table accepts, in the order of its subjects."""

        async def request() -> list[str]:
            info = await self.connection.js.stream_info(self.subjects.table_stream)
            return list(info.config.subjects or [])

        accepted = self.connection.call(self.connection.retry(request, "look up the kinds of cells"), CALL_DEADLINE)
        names = (subject.removeprefix(f"{self.subjects.prefix}.").split(".") for subject in accepted)
        return [name[0] for name in names if name[1:] == ["*"]]

    def list_subjects(self, filter_subject: str, limit: int | None = None) -> list[str]:
        """Return the subjects of cells that a filter matches, about `limit` at most."""
        return self.connection.call(self.list_subjects_async(filter_subject, limit), CALL_DEADLINE)

    async def list_subjects_async(self, filter_subject: str, limit: int | None = None) -> list[str]:
        """Async variant of `list_subjects`."""
        # nats-py requests only the first page of subjects.
        js, endpoint = self.connection.js, f"$JS.API.STREAM.INFO.{self.subjects.table_stream}"

        async def page(offset: int) -> tuple[list[str], int]:
            wanted = json.dumps({"subjects_filter": filter_subject, "offset": offset}).encode()
            reply = await js._api_request(endpoint, wanted, timeout=LIST_TIMEOUT)  # noqa: SLF001
            return list(reply["state"].get("subjects") or {}), int(reply.get("total", 0))

        subjects: list[str] = []
        while True:
            more, total = await self.connection.retry(partial(page, len(subjects)), f"list {filter_subject}")
            subjects += more
            if not more or len(subjects) >= (total if limit is None else min(limit, total)):
                return subjects

    def list_cells(self, filter_subject: str) -> list[CellId]:
        """Return the ids of the cells that a filter matches; other subjects are skipped."""
        return self.connection.call(self.list_cells_async(filter_subject), CALL_DEADLINE)

    async def list_cells_async(self, filter_subject: str) -> list[CellId]:
        """Async variant of `list_cells`."""
        cell_ids = []
        for subject in await self.list_subjects_async(filter_subject):
            with suppress(SubjectError):
                cell_ids.append(self.subjects.parse(subject))
        return cell_ids

    def count_cells(self, filter_subject: str) -> int:
        """Return the number of cells that a filter matches."""
        return len(self.list_subjects(filter_subject))

    def snapshot(
        self, filters: list[str], *, headers_only: bool = False, caught_up: bool = False
    ) -> list[tuple[CellId, Cell]]:
        """Return all current cells of some columns in the order written; other subjects are skipped.

        Args:
            filters: subjects to read.
            headers_only: omit the content of the cells.
            caught_up: also return cells that are written during the snapshot, until all are read. If a cell was purged
                before it could be read, the snapshot then contains all that was written before the purge.
        """
        work = self.snapshot_async(filters, headers_only=headers_only, caught_up=caught_up)
        return self.connection.call(work, CALL_DEADLINE)

    async def snapshot_async(
        self, filters: list[str], *, headers_only: bool = False, caught_up: bool = False
    ) -> list[tuple[CellId, Cell]]:
        """Async variant of `snapshot`."""
        consumer = OrderedConsumer(self.connection, self.subjects.table_stream, filters, headers_only=headers_only)
        cells: list[tuple[CellId, Cell]] = []
        for message in await consumer.read_all(caught_up=caught_up):
            delivery = delivery_of(message)
            cell = Cell(message.subject, delivery.stream_sequence if delivery else 0, message.data)
            with suppress(SubjectError):
                cells.append((self.subjects.parse(message.subject), cell))
        return cells

    async def first_sequence_async(self, filter_subject: str) -> int | None:
        """Return the stream sequence of a filter's first cell; None without a match."""
        message = await self.find_next_async(filter_subject, 1)
        return None if message is None else message.seq

    async def find_next_async(self, filter_subject: str, sequence: int) -> RawStreamMsg | None:
        """Return the first message at a sequence or later that a filter matches."""

        async def look_up() -> RawStreamMsg | None:
            with suppress(NotFoundError):
                stream = self.subjects.table_stream
                return await self.connection.js.get_msg(stream, seq=sequence, subject=filter_subject, next=True)
            return None

        return await self.connection.retry(look_up, f"find {filter_subject}")

    def subject(self, row: RowId, field: str) -> str:
        """Return the subject of a cell of a row."""
        return self.subjects.cell(row, field)
