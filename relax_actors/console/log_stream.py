"""The log of a run as server-sent events, whose ids are the sequences of the log.

History and live messages are one stream: a client that reconnects sends the last id it received, and gets every later
message once, however often the console was killed in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from broker.connection import Connection
from broker.history import History
from broker.table import Cell
from relax_actors.console.plain import encoded
from relax_actors.console.run import STARTS, ConsoleRun
from relax_actors.errors import BrokerError, ConfigError
from relax_actors.monitoring.connection import NotUpError
from relax_actors.monitoring.log_message import LogMessage

POLL_SECONDS = 0.25
"""Pause after a read that found all messages: a burst of events costs four reads a second."""
BEAT_SECONDS = 10.0
"""Time without a message after which a comment shows that the console lives."""


async def log_events(run: ConsoleRun, after: int | None) -> AsyncIterator[bytes]:
    """Yield the messages of a run's log as server-sent events, until the run is over.

    Events: `begin` names the sequence that the stream goes on after, `log` is a message, `reset` says that the log was
    created again, `state` says what the console waits for, and `over` is the last one of a run that is not up. A
    stream that has begun starts no broker, so an open page keeps nobody from resuming the run.

    Args:
        run: the run.
        after: sequence of the last message that the client has; None for the messages that are stored from now on.
    """
    reader, beat = _Reader(run, after), time.monotonic()
    while not reader.is_over:
        if news := await reader.news():
            beat = time.monotonic()
            yield news
        elif time.monotonic() - beat > BEAT_SECONDS:
            beat = time.monotonic()
            yield b": waiting\n\n"
        if not reader.has_more:
            await asyncio.sleep(POLL_SECONDS)


class _Reader:
    """Reads the log from a position on, over restarts of the broker."""

    def __init__(self, run: ConsoleRun, after: int | None) -> None:
        self.is_over = self.has_more = False
        self._run, self._after = run, after
        self._history: tuple[Connection, History] | None = None
        self._problem = ""

    async def news(self) -> bytes:
        """Return the next events; empty if there are none now."""
        self.has_more = False
        try:
            connection = await self._run.connection()
            STARTS.set(False)  # only the request itself may start the broker, and not what it waits for later
            begun = b"" if self._history and self._history[0] is connection else await self._begin(connection)
            history = self._history[1] if self._history else None
            page = await self._run.within(connection, history.page()) if history else []
        except NotUpError as error:
            self.is_over = True
            return _event("over", {"problem": str(error)}, self._after)
        except (BrokerError, ConfigError) as error:
            is_new, self._problem = str(error) != self._problem, str(error)
            return _event("state", {"problem": self._problem}) if is_new else b""
        if self._problem:
            self._problem, begun = "", _event("state", {"problem": ""}) + begun
        return begun + self._page(page)

    def _page(self, page: list[Cell]) -> bytes:
        """Return a page as events; the end of a run that is not up is its last one."""
        if not page:
            self.is_over = not self._run.live
            return _event("over", {}, self._after) if self.is_over else b""
        self.has_more = True
        again = page[0].sequence <= (self._after or 0)
        self._after = page[-1].sequence
        return (_event("reset", {}) if again else b"") + b"".join(map(_message, page))

    async def _begin(self, connection: Connection) -> bytes:
        """Go on after the position in a new connection; from the start if the log has no such sequence."""
        stream, subject = self._run.subjects.log_stream, f"{self._run.subjects.prefix}.>"
        last = await self._run.within(connection, History(connection, stream, subject).last())
        end = 0 if last is None else last.sequence
        known = self._after
        position = end if known is None else known if known <= end else 0
        self._after = position
        self._history = connection, History(connection, stream, subject, position + 1)
        return _event("begin" if known in (None, position) else "reset", {"sequence": position}, position)


def _message(cell: Cell) -> bytes:
    """Return a message of the log as an event; of a malformed one, its subject."""
    body: dict[str, Any] = {"sequence": cell.sequence, "time": cell.stored, "subject": cell.subject}
    if (message := LogMessage.parse(cell.subject, cell.data)) is not None:
        body |= {
            "sender": message.sender,
            "kind": message.kind,
            "event": message.is_event,
            "claim": message.claim,
            "body": message.body,
        }
        with suppress(ValueError, OverflowError):
            if not message.claim and (scalars := message.scalars()) is not None:
                body["step"], body["figures"] = scalars
    return _event("log", body, cell.sequence)


def _event(kind: str, body: dict[str, Any], sequence: int | None = None) -> bytes:
    head = f"id: {sequence}\n" if sequence is not None else ""
    return f"{head}event: {kind}\ndata: ".encode() + encoded(body) + b"\n\n"
