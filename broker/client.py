"""NATS client: survives what other clients publish, and hands messages over without a queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from email.message import Message
from email.parser import BytesParser
from typing import Any

import nats.aio.client
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

log = structlog.get_logger()
MAX_HEADER_BYTES = 4 << 10
"""Longest headers that are read; those of the server and of this project are shorter. nats-py takes seconds to parse
the longest that a server accepts."""
_HEADER_VERSION = "NATS/1.0"
_REVOKED = ("authorization violation", "authentication revoked")
CONNECTION_POLL_SECONDS = 0.02
ASKS_FOR_NONE = "asks for no credentials, so it is not the broker"


class HeaderParser(BytesParser):
    """Parser of the headers of stored messages, which ignores long ones."""

    def parsebytes(self, text: bytes | bytearray, headersonly: bool = False) -> Message:  # noqa: FBT001, FBT002 signature of email
        """Parse headers; empty if they are longer than `MAX_HEADER_BYTES`."""
        return super().parsebytes(text if len(text) <= MAX_HEADER_BYTES else b"", headersonly)


def read_headers(raw: bytes) -> dict[str, str] | None:
    """Parse a message's headers and status; None if they are too long or not UTF-8.

    Of several values of one name the last counts: the server appends its own.
    """
    if len(raw) > MAX_HEADER_BYTES:
        return None
    try:
        first, *lines = raw.decode().split("\r\n")
    except UnicodeDecodeError:
        return None
    headers = {}
    code, _, description = first.removeprefix(_HEADER_VERSION).strip().partition(" ")
    if code.isdigit():
        headers["Status"] = code
        if description:
            headers["Description"] = description
    for line in lines:
        name, _, value = line.partition(":")
        if name:
            headers[name.strip()] = value.strip()
    return headers


def _matters(record: logging.LogRecord) -> bool:
    """Whether a line of asyncio's log is kept; the ends of TLS connections write useless ones."""
    return not record.getMessage().startswith("returning true from eof_received()")


class Client(nats.aio.client.Client):
    """NATS client that survives subjects and headers that are not UTF-8.

    Any publisher can send them, and nats-py would close the connection.
    A connected client whose credentials are revoked signs in again, as soon as the file has newer credentials;
    nats-py would close the connection.

    A request waits while the client is disconnected: nats-py would buffer it with those that repeat it, send them all
    at the next connection, and keep the future of each that does not fit into the buffer.

    A flush is answered after everything that was sent before it: nats-py writes its ping ahead of pending commands, so
    that a subscription may begin after the flush that follows it.

    With TLS configured it refuses a server without TLS, and with credentials a server that asks for none, because that
    is another server at the same address.
    """

    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("asyncio").addFilter(_matters)
        self._direct: dict[int, Callable[[Msg], None]] = {}

    async def _connect_to_server(self, server: Any) -> None:
        earlier: Any = self._transport  # of an attempt that the server refused
        if earlier is not None:
            earlier.close()
        await super()._connect_to_server(server)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,  # noqa: ASYNC109 signature of nats-py
        old_style: bool = False,  # noqa: FBT001, FBT002 signature of nats-py
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Send a request and return its answer; raises nats-py's TimeoutError after `timeout` s."""
        end = time.monotonic() + timeout
        while not (self.is_connected or self.is_closed):
            if time.monotonic() > end:
                raise nats.errors.TimeoutError
            await asyncio.sleep(CONNECTION_POLL_SECONDS)
        return await super().request(subject, payload, timeout, old_style, headers)

    async def subscribe_direct(self, subject: str, handle: Callable[[Msg], None]) -> Subscription:
        """Subscribe with a function that is called for each parsed message, without a queue."""

        async def never(message: Msg) -> None:
            handle(message)

        subscription = await self.subscribe(subject, cb=never)
        self._direct[subscription._id] = handle  # noqa: SLF001
        return subscription

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        transport: Any = self._transport
        if self.is_connected and self._pending:
            transport.writelines(self._pending[:])
            self._pending, self._pending_data_size = [], 0
        await super()._send_ping(future)

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._direct.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        handle = self._direct.get(sid)
        if handle is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            handle(self._build_message(sid, subject, reply, data, read_headers(headers) if headers else None))
        except Exception as error:  # noqa: BLE001 a malformed message must not end the connection
            log.warning("malformed_message", subject=repr(subject)[:200], error=str(error))

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002 signature of nats-py
        if initial_connection and "tls" in self.options and not info.get("tls_required"):
            msg = "nats: the server does not offer TLS, which these credentials require"
            raise nats.errors.Error(msg)
        if initial_connection and self._user_credentials is not None and not info.get("auth_required"):
            raise nats.errors.Error(ASKS_FOR_NONE)
        await super()._process_info(info, initial_connection)

    async def _process_err(self, err_msg: str) -> None:
        if self.is_connected and any(text in err_msg.lower() for text in _REVOKED):
            log.warning("credentials_revoked", error=err_msg)
            await self._process_op_err(nats.errors.AuthorizationError())
            return
        await super()._process_err(err_msg)

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        return Msg(
            _client=self,
            subject=subject.decode(errors="backslashreplace"),
            reply=reply.decode(),
            data=data,
            headers=headers,
            _sid=sid,
        )

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        return read_headers(headers) if headers else None
