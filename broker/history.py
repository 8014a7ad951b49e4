"""History of subjects: bounded pages of stored messages, without a consumer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from nats.aio.msg import Msg

from broker.connection import Connection
from broker.errors import BrokerError
from broker.permissions import API
from broker.table import Cell

PAGE_MESSAGES, PAGE_BYTES = 512, 1 << 20
"""A page ends with the message that reaches one of these."""
_END, _NONE = "204", "404"


class History:
    """Reads the stored messages of a subject in stream order from sequence `start` on.

    All coroutines run in the connection's loop. The connection's user needs `allow_history`.
    """

    def __init__(self, connection: Connection, stream: str, subject: str, start: int = 1) -> None:
        self._connection, self._stream, self._subject = connection, stream, subject
        self._next = start
        self.has_more = False
        """Whether further messages were stored when the last page was read."""
        self._newest: tuple[int, datetime] | None = None
        """Sequence and time of the newest message that was read."""

    async def skip(self) -> None:
        """Continue after the last stored message; raises BrokerError if refused."""
        await self._read({"last_by_subj": self._subject})

    async def last(self) -> Cell | None:
        """Return the newest stored message, or None, without moving `page`; raises BrokerError."""
        cells = [_cell(answer) for answer in await self._answers({"last_by_subj": self._subject}) if _is_stored(answer)]
        return cells[-1] if cells else None

    async def page(self) -> list[Cell]:
        """Return the next messages; empty if there are none now.

        If the stream was created again, as by `relax up --fresh`, the pages begin with its first message.

        Raises:
            BrokerError: the broker refuses the request.
        """
        page = {"seq": self._next, "next_by_subj": self._subject, "batch": PAGE_MESSAGES, "max_bytes": PAGE_BYTES}
        cells = await self._read(page)
        if not cells and await self._is_created_again():
            self._next, self._newest = 1, None
            cells = await self._read({**page, "seq": 1})
        return cells

    async def _is_created_again(self) -> bool:
        """Whether the stream was created again: its last message is newer, its sequence lower."""
        if self._newest is None:
            return False
        for answer in await self._answers({"last_by_subj": ">"}):
            if (known := _position(answer)) is not None:
                return known[0] < self._newest[0] and known[1] > self._newest[1]
        return False

    async def _answers(self, wanted: dict[str, Any]) -> list[Msg]:
        async def ask() -> list[Msg]:
            return await self._ask(json.dumps(wanted).encode())

        return await self._connection.retry(ask, f"read {self._subject} of {self._stream}")

    async def _read(self, wanted: dict[str, Any]) -> list[Cell]:
        answers = await self._answers(wanted)
        stored = [answer for answer in answers if _is_stored(answer)]
        self._newest = max(filter(None, [self._newest, *map(_position, stored[-1:])]), default=None)
        cells = [_cell(answer) for answer in stored]
        # The end of a page names its last message, also where the headers of that are too long to be read.
        ends = [int((answer.headers or {}).get("Nats-Last-Sequence", 0)) for answer in answers[-1:]]
        self.has_more = any(int((answer.headers or {}).get("Nats-Num-Pending", 0)) > 0 for answer in answers[-1:])
        self._next = max([self._next - 1, *ends, *(cell.sequence for cell in cells)]) + 1
        return cells

    async def _ask(self, request: bytes) -> list[Msg]:
        """Return all answers to a request, the end of the page included."""
        messages: list[Msg] = []
        is_page = b"batch" in request

        def take(answer: Msg) -> list[Msg] | None:
            messages.append(answer)
            return messages if self._is_end(answer) or not is_page else None

        return await (await self._connection.requests.send(f"{API}.DIRECT.GET.{self._stream}", request, take))

    def _is_end(self, answer: Msg) -> bool:
        """Whether an answer ends the page.

        A stored message may have any headers; the server's own come after them and replace those of the same name.

        Raises:
            BrokerError: the server refuses the request.
        """
        headers = answer.headers
        if headers is None or "Nats-Stream" in headers:
            return False
        if (status := headers.get("Status")) not in (_END, _NONE):
            said = headers.get("Description", status)
            msg = f"broker {self._connection.address.url} refuses to read {self._subject} of {self._stream}: {said}"
            raise BrokerError(msg)
        return True


class Histories:
    """Reads the stored messages of several subjects of a stream, in stream order.

    The subjects may have wildcards, and match no message in common. Those in `starts` are read from a sequence on. The
    connection's user needs `allow_history`.
    """

    def __init__(
        self, connection: Connection, stream: str, subjects: list[str], starts: Mapping[str, int] | None = None
    ) -> None:
        begins = starts or {}
        self._parts = [_Part(History(connection, stream, subject, begins.get(subject, 1))) for subject in subjects]
        self._all = History(connection, stream, ">")
        self._end: int | None = None
        """Sequence up to which calls read now; None after a call that read everything."""
        self.has_more = True
        """Whether further messages were stored at the last call."""

    async def news(self) -> list[Cell]:
        """Return the next messages in stream order, about a page of each subject at most.

        A sequence below those of earlier calls means that the stream was created again.

        Raises:
            BrokerError: the broker refuses the request.
        """
        end, parts = self._end, self._parts
        if end is None:
            last = await self._all.last()
            end = 0 if last is None else last.sequence
        else:  # subjects without further messages, mostly those of few, are not asked again before the others are read
            parts = [part for part in parts if part.through < end]
        # All reads end before an error is raised: one that goes on would read its page beside that of the next call.
        for problem in await asyncio.gather(*(part.read(end) for part in parts), return_exceptions=True):
            if problem is not None:
                raise problem
        reach = min([end, *(part.through for part in self._parts)])
        self.has_more = reach < end
        self._end = end if self.has_more else None
        return sorted((cell for part in self._parts for cell in part.take(reach)), key=lambda cell: cell.sequence)


class _Part:
    """Messages of one of several subjects that were read and not returned yet."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._unread: list[Cell] = []
        self.through = 0
        """Sequence up to which all messages of the subject were read."""

    async def read(self, end: int) -> None:
        """Read a page, unless one of a subject with further pages is unread."""
        if self._unread and self._history.has_more:
            return
        page = await self._history.page()
        self._unread += page  # kept at once: the caller may cancel this call
        self.through = page[-1].sequence if self._history.has_more and page else end

    def take(self, reach: int) -> list[Cell]:
        """Return the messages up to a sequence."""
        taken = [cell for cell in self._unread if cell.sequence <= reach]
        self._unread = [cell for cell in self._unread if cell.sequence > reach]
        return taken


def _is_stored(answer: Msg) -> bool:
    return "Nats-Stream" in (answer.headers or {})


def _cell(answer: Msg) -> Cell:
    headers = answer.headers or {}
    return Cell(headers["Nats-Subject"], int(headers["Nats-Sequence"]), answer.data, _stored(headers))


def _stored(headers: dict[str, str]) -> float:
    return datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp()


def _position(answer: Msg) -> tuple[int, datetime] | None:
    """Return sequence and time of a stored message; None for the end of a page."""
    headers = answer.headers or {}
    if not _is_stored(answer):
        return None
    return int(headers["Nats-Sequence"]), datetime.fromisoformat(headers["Nats-Time-Stamp"])
