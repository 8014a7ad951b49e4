"""HTTP application of the console: the page, the answers, the stream of the log, and the operations of operators."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from relax_actors.console.api import ANSWERS
from relax_actors.console.errors import RequestError
from relax_actors.console.guard import Guard, Tokens
from relax_actors.console.link import proof
from relax_actors.console.log_stream import log_events
from relax_actors.console.plain import encoded
from relax_actors.console.query import Operation, Query
from relax_actors.console.run import STARTS
from relax_actors.console.runs import ConsoleRuns
from relax_actors.errors import RelaxError
from relax_actors.monitoring.connection import NotUpError
from relax_actors.serving.event_stream import EventStream

PAGE = Path(__file__).parent / "page"
MAX_BODY = 64 << 10
PULSE = "Relax-Pulse"
"""Header of requests that an open page makes by itself: they do not start the broker of a run that is over."""


class Console:
    """The application."""

    def __init__(self, runs: ConsoleRuns, operations: Mapping[str, Operation]) -> None:
        self._runs, self._operations = runs, operations

    def app(self, tokens: Tokens, hosts: tuple[str, ...] = ()) -> ASGIApp:
        """Return the ASGI application.

        Args:
            tokens: bearer tokens.
            hosts: host names besides those of the loopback address under which browsers reach the console.
        """
        routes = [
            Route("/api/session", self._session, methods=["GET"]),
            Route("/api/log", self._log, methods=["GET"]),
            Route("/api/{name}", self._answer, methods=["GET"]),
            Route("/api/{name}", self._operate, methods=["POST"]),
            Route("/proof", _proof_of(tokens.observer), methods=["GET"]),
            Mount("/", StaticFiles(directory=PAGE, html=True)),
        ]
        failed = dict.fromkeys((RequestError, RelaxError, HTTPException, Exception), _failed)
        return Guard(Starlette(routes=routes, exception_handlers=failed), tokens, hosts)

    async def _session(self, request: Request) -> Response:
        names = sorted(self._operations) if request.scope["may_write"] else []
        return JSONResponse({"run": self._runs.first, "operations": names, "answers": ANSWERS.names()})

    async def _answer(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ANSWERS:
            msg = f"there is no answer {name[:80]!r}; known: {', '.join(ANSWERS.names())}"
            raise RequestError(404, msg, "unknown_answer")
        run = await self._runs.get(request.query_params.get("run", ""))
        STARTS.set(PULSE not in request.headers)
        query = Query(run, dict(request.query_params), self._runs.names())
        answer = await ANSWERS.load(name, "")(query)
        return answer if isinstance(answer, Response) else Response(encoded(answer), media_type="application/json")

    async def _log(self, request: Request) -> Response:
        run = await self._runs.get(request.query_params.get("run", ""))
        given = request.headers.get("last-event-id") or request.query_params.get("after")
        if given is not None and not (given.isascii() and given.isdigit() and len(given) < 20):  # noqa: PLR2004
            msg = f"Last-Event-ID {given[:40]!r} is no sequence of a log; send the id of the last event received"
            raise RequestError(400, msg, "invalid_parameter")
        STARTS.set(PULSE not in request.headers)
        return EventStream(log_events(run, None if given is None else int(given)), lambda: None)

    async def _operate(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._operations:
            msg = f"there is no operation {name[:80]!r}; known: {', '.join(sorted(self._operations)) or 'none'}"
            raise RequestError(404, msg, "unknown_operation")
        run = await self._runs.get(request.query_params.get("run", ""))
        body = await _object(request)
        return JSONResponse(dict(await asyncio.to_thread(self._operations[name], run, body)))


def _proof_of(token: str) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers a nonce with a proof that this console holds a token; anybody may ask for it."""

    async def answer(request: Request) -> Response:
        nonce = request.query_params.get("nonce", "")
        if not 16 <= len(nonce) <= 128:  # noqa: PLR2004
            msg = "parameter nonce must have 16 to 128 characters"
            raise RequestError(400, msg, "invalid_parameter")
        return PlainTextResponse(proof(token, request.scope["server"][1], nonce))

    return answer


async def _object(request: Request) -> dict[str, Any]:
    """Read the JSON object of a request; raises RequestError if it is too large or no JSON object."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY:
            msg = f"the request is larger than {MAX_BODY >> 10} KiB"
            raise RequestError(413, msg, "too_large")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        msg = "the request is no JSON object"
        raise RequestError(400, msg, "invalid_request")
    return body


async def _failed(request: Request, error: Exception) -> Response:
    """Answer an error: one that a person can mend by its text, another by its type."""
    del request
    if isinstance(error, RequestError):
        return error.response()
    if isinstance(error, HTTPException):
        return RequestError(error.status_code, f"no such page: {error.detail}", "not_found").response()
    if isinstance(error, NotUpError):
        return RequestError(409, str(error), "run_not_up").response()
    if isinstance(error, RelaxError):
        return RequestError(409, str(error), "run_unavailable").response()
    return RequestError(500, f"the console failed: {type(error).__name__}: {error}", "failed").response()
