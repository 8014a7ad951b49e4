"""Durable table of a run: write and purge cells, and all that `TableReader` does.

Invariant: until its row is purged, a subject holds at most one message, and the message never changes. The server
refuses a second write; a refused write means "already done" and is not an error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any

import structlog
from nats.aio.msg import Msg
from nats.js.errors import APIError

from broker.connection import TRANSIENT, Connection
from broker.encoder import CellEncoder
from broker.errors import BrokerError, BrokerFullError
from broker.requests import Requests
from broker.store import Store
from broker.subjects import Subjects
from broker.table_reader import CALL_DEADLINE, Cell, Fill, TableReader

__all__ = ["CALL_DEADLINE", "PATIENCE", "Cell", "Fill", "Table"]

log = structlog.get_logger()
PATIENCE = CALL_DEADLINE - 60.0
"""Default seconds that a write waits for room in the broker."""
_PURGE_CONCURRENCY = 32
_STORE_FAILED = 10077
_MESSAGE_DELETED = (10037, 10043, 10057)
_ALREADY_WRITTEN = "maximum messages per subject exceeded"


class Table(TableReader):
    """Cells of one run, to look up and to write; `author` is `<role>.<n>#<incarnation>`."""

    def __init__(
        self, connection: Connection, subjects: Subjects, store: Store, author: str, *, direct: bool = True
    ) -> None:
        super().__init__(connection, subjects, store, direct=direct)
        self.author = author
        self.patience = PATIENCE
        """Seconds that a write waits for room in the broker."""

    def encoder(self) -> CellEncoder:
        """Return an encoder for cells that are written together."""
        return CellEncoder(self.subjects, self.store, self.author, self.connection.nc.max_payload)

    def encode(self, subject: str, value: Any) -> bytes:
        """Encode a cell and write its large arrays to the store. Does not publish the cell.

        Raises:
            CodecError: the value cannot be encoded, or the cell is too large.
            StoreFullError: no space is left for the arrays.
        """
        return self.encode_all([(subject, value)])[0]

    def encode_all(self, cells: Iterable[tuple[str, Any]]) -> list[bytes]:
        """Encode cells that are written together: arrays of one step share a segment."""
        encoder = self.encoder()
        encoded = [encoder.encode(subject, value) for subject, value in cells]
        encoder.close()
        return encoded

    async def put_async(self, subject: str, data: bytes) -> bool:
        """Write an encoded cell; False if the cell was already written.

        Waits up to `patience` seconds if the broker is full.

        Raises:
            BrokerFullError: the broker had no room for the cell during that time.
            BrokerError: another stream accepted the cell, or the credentials do not permit the write.
        """
        start = time.monotonic()
        while True:
            try:
                return await self._publish(subject, data)
            except BrokerFullError as error:
                if time.monotonic() - start > self.patience:
                    raise
                log.warning("waiting_for_room", error=str(error))
            self.connection.on_wait()
            await asyncio.sleep(0.5)

    async def _publish(self, subject: str, data: bytes) -> bool:
        async def attempt() -> bool:
            answer = await publish(self.connection.requests, subject, data)
            await asyncio.wait((answer,))
            return self._is_stored(subject, answer)

        return await self.connection.retry(attempt, f"write {subject}")

    def _is_stored(self, subject: str, answer: asyncio.Future[dict[str, Any]]) -> bool:
        """Return whether the server stored a cell; False if it was already written."""
        try:
            stream = answer.result().get("stream")
        except APIError as error:
            # The server uses one code for every failed store; only this text means "already written".
            if error.err_code == _STORE_FAILED:
                if error.description == _ALREADY_WRITTEN:
                    return False
                msg = f"broker cannot store {subject}: {error.description}; free space or raise broker.max_bytes"
                raise BrokerFullError(msg) from error
            raise
        if stream != self.subjects.table_stream:
            msg = f"{subject} went to stream {stream}, which is not this run's; remove it or set run.name"
            raise BrokerError(msg)
        return True

    def put(self, subject: str, value: Any) -> bool:
        """Encode and write a cell; False if it was already written."""
        return self.connection.call(self.put_async(subject, self.encode(subject, value)), CALL_DEADLINE)

    def put_all(self, cells: Iterable[tuple[str, Any]]) -> list[bool]:
        """Encode cells and write them concurrently, in no particular order; see `put`."""
        cells = list(cells)
        encoded = self.encode_all(cells)
        return self.put_encoded([(subject, data) for (subject, _), data in zip(cells, encoded, strict=True)])

    def put_encoded(self, cells: list[tuple[str, bytes]]) -> list[bool]:
        """Write encoded cells concurrently, in no particular order; see `put` for the results."""
        return self.call(self.put_encoded_async(cells))

    async def put_encoded_async(self, cells: list[tuple[str, bytes]]) -> list[bool]:
        """Async variant of `put_encoded`: one write, then all acknowledgements."""
        answers = [await publish(self.connection.requests, subject, data) for subject, data in cells]
        if answers:
            await asyncio.wait(answers)

        async def finish(subject: str, data: bytes, answer: asyncio.Future[dict[str, Any]]) -> bool:
            try:
                return self._is_stored(subject, answer)
            except (*TRANSIENT, APIError, BrokerFullError):
                return await self.put_async(subject, data)

        return [await finish(*cell, answer) for cell, answer in zip(cells, answers, strict=True)]

    def remove(self, cells: Iterable[Cell]) -> None:
        """Delete exactly these messages; newer cells on the same subjects stay."""

        async def remove_one(cell: Cell) -> None:
            async def request() -> None:
                try:
                    await self.connection.js.delete_msg(self.subjects.table_stream, cell.sequence)
                except APIError as error:
                    if error.err_code not in _MESSAGE_DELETED:  # deleted by another process
                        raise

            await self.connection.retry(request, f"remove {cell.subject}")

        async def work() -> None:
            await asyncio.gather(*map(remove_one, cells))

        self.connection.call(work(), CALL_DEADLINE)

    def remove_subjects(self, subjects: Iterable[str], before: int) -> None:
        """Remove the messages of subjects that name no cell, each taken literally.

        The server stores a message that is published on `group.*.*.reward`; a purge of it would remove all rewards.
        Messages at the stream sequence `before` or later stay.
        """
        exact: list[str] = []
        wild: list[str] = []
        for subject in subjects:
            (wild if {"*", ">"} & set(subject.split(".")) else exact).append(subject)
        self.purge(exact, before)
        while wild:
            cells = self.call(self._find_all(wild[:_PURGE_CONCURRENCY]))
            self.remove(cell for cell in cells if cell is not None and cell.sequence < before)
            del wild[:_PURGE_CONCURRENCY]

    async def _find_all(self, subjects: list[str]) -> list[Cell | None]:
        return await asyncio.gather(*map(self._find, subjects))

    async def _find(self, subject: str) -> Cell | None:
        """Find the message whose subject is exactly this one, which may contain wildcards."""
        cell = await self.get_async(subject, direct=False)
        after = 0
        while cell is not None and cell.subject != subject:
            message = await self.find_next_async(subject, after + 1)
            after = 0 if message is None else message.seq or 0
            cell = None if message is None else Cell(message.subject or "", after, b"")
        return cell

    def purge(self, filters: Iterable[str], before: int | None = None) -> None:
        """Remove the cells that filters match, but those at the stream sequence `before` or later.

        Their subjects then accept writes again.
        """

        async def purge_one(subject: str) -> None:
            async def request() -> bool:
                return await self.connection.js.purge_stream(self.subjects.table_stream, seq=before, subject=subject)

            await self.connection.retry(request, f"purge {subject}")

        async def work() -> None:
            pending = list(filters)
            while pending:
                await asyncio.gather(*map(purge_one, pending[:_PURGE_CONCURRENCY]))
                del pending[:_PURGE_CONCURRENCY]

        self.connection.call(work(), CALL_DEADLINE)


async def publish(requests: Requests, subject: str, data: bytes) -> asyncio.Future[dict[str, Any]]:
    """Publish to a stream; return the future of the acknowledgement without waiting.

    The future raises `APIError` if the stream refuses the message, and the errors of `Requests.send`.
    """
    return await requests.send(subject, data, _acknowledgement)


def _acknowledgement(message: Msg) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(message.data)
    if "error" in body:
        APIError.from_error(body["error"])  # raises it
    return body
