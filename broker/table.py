"""The run's durable table: cells written once, looked up, followed and purged.

Invariant: while its row lives, a subject holds at most one message, and it never changes. The server itself
refuses the second write; a refused write means "already done".
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog
from nats.errors import NoRespondersError
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, NotFoundError

from broker.codec import Envelope, decode_fields, encode, open_envelope
from broker.connection import Bridge
from broker.errors import BrokerError, BrokerFullError, CodecError, SubjectError
from broker.pull import Follower
from broker.store import Store
from broker.subjects import CellId, RowId, Subjects

T = TypeVar("T")
log = structlog.get_logger()
PATIENCE = 300.0
CALL_DEADLINE = PATIENCE + 60.0
LIST_SECONDS = 10.0
_STORE_FAILED = 10077
_GONE = (10037, 10043, 10057)
_ALREADY_THERE = "maximum messages per subject exceeded"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell as it lies in the table; if it is followed, `stored` is when (seconds since 1970, by the server)."""

    subject: str
    sequence: int
    data: bytes
    stored: float = 0.0


class Table:
    """The cells of one run.

    Methods named `..._async` run in the bridge's loop; the others may be called from any other thread and have a
    deadline of `CALL_DEADLINE` seconds.
    """

    def __init__(self, bridge: Bridge, subjects: Subjects, store: Store, author: str, *, direct: bool = True) -> None:
        self.bridge = bridge
        self.subjects = subjects
        self.store = store
        self.author = author
        self.patience = PATIENCE
        # Who may ask for a message as it is may have it published anywhere (`broker.permissions`): users may not.
        self._direct = direct and bridge.address.credentials is None

    def encode(self, subject: str, value: Any) -> bytes:
        """Encode a cell for a subject; its large arrays are in the store when this returns.

        Raises:
            CodecError: the value cannot be encoded.
            StoreFullError: no space left for the arrays.
        """
        cell = self.subjects.parse(subject)
        if not cell.field:
            return encode(value, self.author, subject=subject)
        segment = self.store.segment(cell.row, cell.field, self.author)
        data = encode(value, self.author, segment.place)
        if len(data) > self.bridge.nc.max_payload:
            msg = f"cell {subject} has {len(data)} bytes, the broker's max_payload is {self.bridge.nc.max_payload}"
            raise CodecError(msg)
        segment.close()
        return data

    async def put_async(self, subject: str, data: bytes) -> bool:
        """Write an encoded cell; False if it was there already. Room for it is waited for, `patience` seconds.

        Raises:
            BrokerFullError: the broker had no room for it all that time.
        """
        start = time.monotonic()
        while True:
            try:
                return await self._publish(subject, data)
            except BrokerFullError as error:
                if time.monotonic() - start > self.patience:
                    raise
                log.warning("waiting_for_room", error=str(error))
            self.bridge.waiting()
            await asyncio.sleep(0.5)

    async def _publish(self, subject: str, data: bytes) -> bool:

        async def publish() -> bool:
            try:
                # Without headers: they would be stored with the cell, and every reader's client would parse them.
                stored = await self.bridge.js.publish(subject, data)
            except APIError as error:
                # The server has one code for every failed store; only this very text means "already there".
                if error.err_code == _STORE_FAILED:
                    if error.description == _ALREADY_THERE:
                        return False
                    msg = f"broker cannot store {subject}: {error.description}; free space or raise broker.max_bytes"
                    raise BrokerFullError(msg) from error
                raise
            if stored.stream != self.subjects.table_stream:
                msg = f"{subject} went to stream {stored.stream}, which is not this run's; remove it, or set run.name"
                raise BrokerError(msg)
            return True

        return await self.bridge.persist(publish, f"write {subject}")

    def put(self, subject: str, value: Any) -> bool:
        """Encode and write a cell; False if it was there already."""
        return self.bridge.call(self.put_async(subject, self.encode(subject, value)), CALL_DEADLINE)

    def put_all(self, cells: Iterable[tuple[str, Any]]) -> list[bool]:
        """Encode cells and write them concurrently, in no order."""
        return self.put_encoded([(subject, self.encode(subject, value)) for subject, value in cells])

    def put_encoded(self, cells: list[tuple[str, bytes]]) -> list[bool]:
        """Write encoded cells concurrently, in no order."""

        async def work() -> list[bool]:
            return await asyncio.gather(*(self.put_async(subject, data) for subject, data in cells))

        return self.bridge.call(work(), CALL_DEADLINE)

    async def get_async(self, subject: str, *, direct: bool = True) -> Cell | None:
        """The cell at a subject, or None.

        A message without content whose headers claim that it is not there is None as well, but not with `direct`
        false, which asks the stream's leader.
        """

        async def ask(*, direct: bool) -> RawStreamMsg | None:
            try:
                return await self.bridge.js.get_last_msg(self.subjects.table_stream, subject, direct=direct)
            except NotFoundError:
                return None

        async def look_up() -> RawStreamMsg | None:
            if direct and self._direct:
                # The answer has the message's own headers among the server's, and they may say anything.
                with suppress(APIError, NoRespondersError, ValueError, KeyError):
                    return await ask(direct=True)
            return await ask(direct=False)

        found = await self.bridge.persist(look_up, f"look up {subject}")
        if found is None:
            return None
        return Cell(found.subject or subject, found.seq or 0, found.data or b"")

    def get(self, subject: str, *, direct: bool = True) -> Cell | None:
        """The cell at a subject, or None; see `get_async`."""
        return self.bridge.call(self.get_async(subject, direct=direct), CALL_DEADLINE)

    def get_all(self, subjects: Iterable[str]) -> list[Cell | None]:
        """Look cells up concurrently, in the order asked."""

        async def work() -> list[Cell | None]:
            return await asyncio.gather(*(self.get_async(subject) for subject in subjects))

        return self.bridge.call(work(), CALL_DEADLINE)

    def read(self, data: bytes, expected: type[T], *, subject: str | None = None) -> T:
        """Decode a cell's bytes, arrays in the store included; see `broker.codec` and `Store.read` for the errors.

        With `subject` the checksum of a numbered cell is checked; a reader that acts on one must.
        """
        return decode_fields(open_envelope(data, self.store.reader(), subject=subject), expected)

    def open(self, data: bytes) -> Envelope:
        """Decode a cell's envelope, arrays in the store included."""
        return open_envelope(data, self.store.reader())

    def fetch(self, subject: str, expected: type[T]) -> T | None:
        """Look a cell up and decode it."""
        cell = self.get(subject)
        numbered = not self.subjects.parse(subject).field
        return None if cell is None else self.read(cell.data, expected, subject=subject if numbered else None)

    def fetch_last(self, kind: str, expected: type[T]) -> T | None:
        """The numbered cell of a kind that was written last, decoded; malformed ones are passed over."""
        return self.bridge.call(self.fetch_last_async(kind, expected), CALL_DEADLINE)

    async def fetch_last_async(self, kind: str, expected: type[T]) -> T | None:
        """As `fetch_last`."""
        every = self.subjects.numbered(kind, "*")
        last = await self.get_async(every, direct=False)
        if last is None:
            return None
        with suppress(CodecError):
            return self.read(last.data, expected, subject=last.subject)
        numbers = [cell.step for cell in await self.cells_async(every)]
        for number in sorted(numbers, reverse=True):
            cell = await self.get_async(self.subjects.numbered(kind, number), direct=False)
            with suppress(CodecError):
                if cell is not None:
                    return self.read(cell.data, expected, subject=cell.subject)
        return None

    def written(self, filter_subject: str) -> list[str]:
        """Subjects of the cells that a filter matches."""
        return self.bridge.call(self.written_async(filter_subject), CALL_DEADLINE)

    async def written_async(self, filter_subject: str) -> list[str]:
        """As `written`."""
        # nats-py asks for the first page of subjects only.
        js, endpoint = self.bridge.js, f"$JS.API.STREAM.INFO.{self.subjects.table_stream}"

        async def page(offset: int) -> tuple[list[str], int]:
            wanted = json.dumps({"subjects_filter": filter_subject, "offset": offset}).encode()
            reply = await js._api_request(endpoint, wanted, timeout=LIST_SECONDS)  # noqa: SLF001
            return list(reply["state"].get("subjects") or {}), int(reply.get("total", 0))

        found: list[str] = []
        while True:
            more, total = await self.bridge.persist(partial(page, len(found)), f"list {filter_subject}")
            found += more
            if not more or len(found) >= total:
                return found

    def cells(self, filter_subject: str) -> list[CellId]:
        """The cells that a filter matches; a subject that is none of the run's cells is left out."""
        return self.bridge.call(self.cells_async(filter_subject), CALL_DEADLINE)

    async def cells_async(self, filter_subject: str) -> list[CellId]:
        """As `cells`."""
        found = []
        for subject in await self.written_async(filter_subject):
            with suppress(SubjectError):
                found.append(self.subjects.parse(subject))
        return found

    def count(self, filter_subject: str) -> int:
        """How many cells a filter matches."""
        return len(self.written(filter_subject))

    def snapshot(
        self, filters: list[str], *, headers_only: bool = False, caught_up: bool = False
    ) -> list[tuple[CellId, Cell]]:
        """All cells of some columns as they are now, in the order they were written; other subjects are left out.

        With `caught_up` also what is written meanwhile, until there is nothing more: a cell that was purged before it
        could be read is then missing only together with what was written before the purge, which is there.
        """
        work = self.snapshot_async(filters, headers_only=headers_only, caught_up=caught_up)
        return self.bridge.call(work, CALL_DEADLINE)

    async def snapshot_async(
        self, filters: list[str], *, headers_only: bool = False, caught_up: bool = False
    ) -> list[tuple[CellId, Cell]]:
        """As `snapshot`."""
        follower = Follower(self.bridge, self.subjects.table_stream, filters, headers_only=headers_only)
        found: list[tuple[CellId, Cell]] = []
        seen = 0
        try:
            async for batch in follower.batches(tick=0.5):
                seen += len(batch)
                for message in batch:
                    sequence = message.metadata.sequence
                    cell = Cell(message.subject, sequence.stream if sequence else 0, message.data)
                    with suppress(SubjectError):
                        found.append((self.subjects.parse(message.subject), cell))
                if not batch and follower.drained:
                    break
                if batch and batch[-1].metadata.num_pending == 0:
                    break
                if seen >= (follower.backlog or 0) and not caught_up:
                    break
        finally:
            await follower.close()
        return found

    def remove(self, cells: Iterable[Cell]) -> None:
        """Remove just these messages; what was written to their subjects since stays."""

        async def one(cell: Cell) -> None:
            async def request() -> None:
                try:
                    await self.bridge.js.delete_msg(self.subjects.table_stream, cell.sequence)
                except APIError as error:
                    if error.err_code not in _GONE:  # somebody else has removed it already
                        raise

            await self.bridge.persist(request, f"remove {cell.subject}")

        async def work() -> None:
            await asyncio.gather(*map(one, cells))

        self.bridge.call(work(), CALL_DEADLINE)

    def purge(self, filters: Iterable[str]) -> None:
        """Remove all cells that a filter matches; their subjects could be written again, so writers heed the floor."""

        async def one(subject: str) -> None:
            async def request() -> bool:
                return await self.bridge.js.purge_stream(self.subjects.table_stream, subject=subject)

            await self.bridge.persist(request, f"purge {subject}")

        async def work() -> None:
            pending = list(filters)
            while pending:
                await asyncio.gather(*map(one, pending[:32]))
                del pending[:32]

        self.bridge.call(work(), CALL_DEADLINE)

    def cell(self, row: RowId, field: str) -> str:
        """Subject of a row's cell."""
        return self.subjects.cell(row, field)
