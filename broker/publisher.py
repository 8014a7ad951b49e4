"""Publisher of messages to streams: many messages under way, one subscription for all acknowledgements."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.js.errors import APIError, NoStreamResponseError

from broker.client import Client

ACK_TIMEOUT = 2.0
_NO_RESPONDERS = "503"


class Publisher:
    """Publishes messages to streams and receives the server's acknowledgements.

    Messages published in one turn of the event loop leave in one write, and their acknowledgements need neither a task
    nor a timer each. All methods run in the connection's loop.

    Args:
        client: client of the connection.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = client.new_inbox()
        self._subscribing: asyncio.Task[Any] | None = None
        self._number = 0
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._deadlines: deque[tuple[float, str]] = deque()
        """Deadline and number of every message, in the order published; acknowledged ones included."""
        self._timer: asyncio.TimerHandle | None = None

    async def publish(self, subject: str, data: bytes) -> asyncio.Future[dict[str, Any]]:
        """Publish a message and return the future of its acknowledgement, without waiting for it.

        The future raises `APIError` if the stream refuses the message, `NoStreamResponseError` if no stream takes it,
        nats-py's `TimeoutError` after `ACK_TIMEOUT` seconds, and other errors of nats-py if the message cannot be sent.
        """
        if self._subscribing is None:
            self._subscribing = asyncio.ensure_future(self._client.subscribe_direct(f"{self._inbox}.*", self._on_ack))
        # Shielded: the cancellation of one caller would cancel the subscription of all later messages.
        await asyncio.shield(self._subscribing)
        loop = asyncio.get_running_loop()
        self._number += 1
        number = str(self._number)
        answer = self._waiting[number] = loop.create_future()
        self._deadlines.append((loop.time() + ACK_TIMEOUT, number))
        if self._timer is None:
            self._timer = loop.call_later(ACK_TIMEOUT, self._expire)
        try:
            await self._client.publish(subject, data, reply=f"{self._inbox}.{number}")
        except nats.errors.Error as error:
            self._fail(number, error)
        return answer

    def _fail(self, number: str, error: Exception) -> None:
        answer = self._waiting.pop(number, None)
        if answer is not None and not answer.done():
            answer.set_exception(error)
            answer.exception()  # a caller that was cancelled never asks for it

    def _on_ack(self, message: Msg) -> None:
        number = message.subject.rpartition(".")[2]
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            self._fail(number, NoStreamResponseError())
            return
        body = json.loads(message.data)
        if "error" in body:
            try:
                APIError.from_error(body["error"])  # raises it
            except APIError as error:
                self._fail(number, error)
        elif (answer := self._waiting.pop(number, None)) is not None and not answer.done():
            answer.set_result(body)

    def _expire(self) -> None:
        """Fail the messages whose acknowledgement is overdue."""
        loop = asyncio.get_running_loop()
        now, self._timer = loop.time(), None
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in self._waiting):
            self._fail(self._deadlines.popleft()[1], nats.errors.TimeoutError())
        if self._deadlines:
            self._timer = loop.call_later(self._deadlines[0][0] - now, self._expire)
