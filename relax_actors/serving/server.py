"""HTTP server of gateway and console: uvicorn in a running event loop, with deadlines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from relax_actors.serving.errors import ApiError

IDLE_SECONDS = 15.0
"""Time that a connection may take between two requests, and for the head of a request; twice this at most."""
FINISH_SECONDS, STOP_SECONDS = 2.0, 3.0
"""Time that running requests have to finish when the server stops, and time until their connections are closed."""
MAX_HEAD_BYTES = 32 << 10


class _Protocol(H11Protocol):
    """Connection that is closed if the head of a request does not arrive in time."""

    _seen: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._guard = self.loop.call_later(IDLE_SECONDS, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        cycle = self.cycle
        if self.transport.is_closing():
            self.transport.abort()  # its client does not read what is left
            return
        if cycle is None or cycle.response_complete:
            mark = cycle or self
            if self._seen is mark:
                self.transport.close()
                return
            self._seen = mark
        self._guard = self.loop.call_later(IDLE_SECONDS, self._check)


class _HeadLimit:
    """Application that refuses large request heads, which the parser limits only in pieces."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lines = [len(name) + len(value) + len(": \r\n") for name, value in scope["headers"]]
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(lines)
        if size <= MAX_HEAD_BYTES:
            await self._app(scope, receive, send)
            return
        msg = f"the head of the request has {size} bytes, more than {MAX_HEAD_BYTES}; send shorter headers"
        error = ApiError(431, msg, "head_too_large")
        await JSONResponse(error.openai(), error.status, {"Connection": "close"})(scope, receive, send)


class HttpServer:
    """Serves an ASGI application on one address, with a limit of connections, and with TLS.

    `listener` is a socket of `relax_actors.serving.listening.listen`, which is closed at the end.
    """

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        certificate: tuple[Path, Path] | None = None,
        connections: int = 512,
    ) -> None:
        self._socket = listener
        host, self.port = listener.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        self.url = f"{'http' if certificate is None else 'https'}://{name}:{self.port}"
        files = {} if certificate is None else {"ssl_certfile": certificate[0], "ssl_keyfile": str(certificate[1])}
        config = uvicorn.Config(
            _HeadLimit(app),
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(IDLE_SECONDS),
            timeout_graceful_shutdown=int(STOP_SECONDS),
            limit_concurrency=connections,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            **files,  # type: ignore[arg-type]
        )
        self._server = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> asyncio.Task[None]:
        """Begin to serve; return the task that ends if the server fails."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 uvicorn has no event for it
            await asyncio.sleep(0.01)
        return self._serving

    async def stop(self, refuse: Callable[[], None]) -> None:
        """Finish the running requests, for `STOP_SECONDS` at most, and close.

        After `FINISH_SECONDS` `refuse` is called, which answers the requests that still run with an error.
        """
        self._server.should_exit = True
        refusing = asyncio.get_running_loop().call_later(FINISH_SECONDS, refuse)
        if self._serving is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._serving, STOP_SECONDS + 1)
        refusing.cancel()
        self._socket.close()
