"""Requests to the server: many under way, one subscription for all answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import nats.errors
from nats.aio.msg import Msg
from nats.js.errors import NoStreamResponseError

from broker.client import Client

ANSWER_TIMEOUT = 2.0
_NO_RESPONDERS = "503"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Pending:
    take: Callable[[Msg], Any]
    result: asyncio.Future[Any]


class Requests:
    """Sends requests and receives their answers.

    Requests sent in one turn of the event loop leave in one write, and their answers need neither a task nor a timer
    each. All methods run in the connection's loop.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = client.new_inbox()
        self._subscribing: asyncio.Task[Any] | None = None
        self._number = 0
        self._pending: dict[str, _Pending] = {}
        self._deadlines: deque[tuple[float, str]] = deque()
        """Deadline and number of every request, in the order sent; answered ones included."""
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, subject: str, data: bytes, take: Callable[[Msg], T | None]) -> asyncio.Future[T]:
        """Send a request and return the future of its result, without waiting for it.

        `take` receives each answer; it returns the result, or None if more answers follow. The future raises what
        `take` raises, `NoStreamResponseError` if nobody answers the subject, nats-py's `TimeoutError` after
        `ANSWER_TIMEOUT` seconds, and other errors of nats-py if the request cannot be sent.
        """
        if self._subscribing is None:
            self._subscribing = asyncio.ensure_future(
                self._client.subscribe_direct(f"{self._inbox}.*", self._on_answer)
            )
        if not self._subscribing.done():
            # Shielded: the cancellation of one caller would cancel the subscription of all later requests.
            await asyncio.shield(self._subscribing)
        self._subscribing.result()
        loop = asyncio.get_running_loop()
        self._number += 1
        number = str(self._number)
        result: asyncio.Future[T] = loop.create_future()
        self._pending[number] = _Pending(take, result)
        self._deadlines.append((loop.time() + ANSWER_TIMEOUT, number))
        if self._timer is None:
            self._timer = loop.call_later(ANSWER_TIMEOUT, self._expire)
        try:
            await self._client.publish(subject, data, reply=f"{self._inbox}.{number}")
        except nats.errors.Error as error:
            self._fail(number, error)
        return result

    def _fail(self, number: str, error: Exception) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None and not pending.result.done():
            pending.result.set_exception(error)
            pending.result.exception()  # a caller that was cancelled never asks for it

    def _on_answer(self, message: Msg) -> None:
        number = message.subject.rpartition(".")[2]
        pending = self._pending.get(number)
        if pending is None:
            return
        if not message.data and (message.headers or {}).get("Status") == _NO_RESPONDERS:
            self._fail(number, NoStreamResponseError())
            return
        try:
            result = pending.take(message)
        except Exception as error:  # noqa: BLE001 handed to the caller
            self._fail(number, error)
            return
        if result is not None:
            del self._pending[number]
            if not pending.result.done():
                pending.result.set_result(result)

    def _expire(self) -> None:
        """Fail the requests whose answer is overdue."""
        loop = asyncio.get_running_loop()
        now, self._timer = loop.time(), None
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in self._pending):
            self._fail(self._deadlines.popleft()[1], nats.errors.TimeoutError())
        if self._deadlines:
            self._timer = loop.call_later(self._deadlines[0][0] - now, self._expire)
