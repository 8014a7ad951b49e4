"""Bodies and credentials of HTTP requests, read within limits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from relax_actors.serving.errors import ApiError

BODY_SECONDS = 30.0
"""Time for the whole body of a request to arrive."""
MAX_DEPTH = 48
"""Deepest nesting of a body."""


def bearer(request: Request) -> str:
    """Return the bearer token of a request, or Anthropic's `x-api-key`; empty without one."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


def player_of(request: Request) -> str:
    """Return the player of a session that asks; empty if the client names none."""
    return request.headers.get("x-relax-player", "")


def is_retry(request: Request) -> bool:
    """Whether an SDK says that it repeats a request."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0")


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object of a body; raises ApiError if it is malformed, large or slow."""
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await _read(request, max_bytes)
    except TimeoutError as error:
        msg = f"the body did not arrive within {BODY_SECONDS:g} s; send it again"
        raise ApiError(408, msg, "timeout") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client closed the connection", "disconnected") from error
    try:
        body = json.loads(data or b"{}", parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        msg = f"the body is not JSON: {_reason(error, data)}"
        raise ApiError(400, msg, "invalid_json") from error
    if not isinstance(body, dict):
        msg = f"the body is a {type(body).__name__}, not a JSON object"
        raise ApiError(400, msg, "invalid_json")
    if _depth_over(body, MAX_DEPTH):
        msg = f"the body is nested deeper than {MAX_DEPTH} levels"
        raise ApiError(400, msg, "invalid_json")
    return body


async def _read(request: Request, max_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(data)


def _too_large(max_bytes: int) -> ApiError:
    msg = (
        f"the body has more than {max_bytes} bytes; shorten the conversation or its media, or raise "
        "gateway.max_body_bytes"
    )
    return ApiError(413, msg, "request_too_large")


def _reason(error: ValueError | RecursionError, data: bytes) -> str:
    """Return what is wrong with JSON, with the place as line, column in characters and byte."""
    if isinstance(error, json.JSONDecodeError):
        byte = len(error.doc[: error.pos].encode(errors="surrogatepass"))
        return f"{error.msg} in line {error.lineno}, column {error.colno} (byte {byte + 1})"
    if isinstance(error, UnicodeDecodeError):
        before = data[: error.start].decode(error.encoding, errors="replace")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return f"{error.reason} of {error.encoding} in line {line}, column {column} (byte {error.start + 1})"
    return str(error)[:200] or type(error).__name__


def _refuse(name: str) -> Any:
    msg = f"{name} is no number"
    raise ValueError(msg)


def _depth_over(value: Any, limit: int) -> bool:
    layer = [value]
    for _ in range(limit):
        layer = [
            inner
            for outer in layer
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not layer:
            return False
    return True
