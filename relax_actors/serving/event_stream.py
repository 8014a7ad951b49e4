"""Streamed HTTP responses: bounded for slow readers, and closed with their request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from relax_actors.serving.errors import ApiError

SEND_SECONDS = 30.0
"""Time in which a client must read what the socket's buffers hold, else its connection is closed."""


class EventStream(StreamingResponse):
    """Sends events as they come; the next is made when the client has read the last.

    `on_close` is called once, when the response is complete or its client has left.
    """

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()

    async def stream_response(self, send: Send) -> None:
        """Send the events; give a client up that reads nothing."""

        async def bounded(message: object) -> None:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)  # type: ignore[arg-type]

        with suppress(TimeoutError):
            await super().stream_response(bounded)


async def wait_for_client(request: Request, *work: asyncio.Future[Any], seconds: float | None = None) -> None:
    """Wait for some work, a time, or that the client has left, which raises ApiError."""

    async def departure() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving: asyncio.Future[Any] = asyncio.ensure_future(departure())
    try:
        await asyncio.wait({leaving, *work}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done() and not any(one.done() for one in work):
            raise ApiError(400, "the client closed the connection", "disconnected")
    finally:
        leaving.cancel()
