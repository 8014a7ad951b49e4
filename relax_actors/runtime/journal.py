"""Journal of an actor: bounded events and metrics as JSON on the log stream."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
import time
import uuid
from typing import Any

import nats.errors
import structlog
from nats.js.errors import APIError

from broker.connection import Connection
from broker.subjects import Subjects
from relax_actors.errors import BrokerError

log = structlog.get_logger()
PATIENCE = 30.0
MAX_TEXT, MAX_ITEMS, MAX_BYTES = 16_000, 256, 128 << 10
SHORT_TEXT = 2000
"""Length of each text of an event that would exceed `MAX_BYTES`."""
BURST, RATE = 200, 20.0
REPORT_SECONDS = 5.0


class RateLimiter:
    """Rate limit per kind: `burst` at once, then `rate` a second; counts the refused ones."""

    def __init__(self, burst: int = BURST, rate: float = RATE) -> None:
        self._burst, self._rate = burst, rate
        self._left: dict[str, tuple[float, float]] = {}
        self._refused: dict[str, int] = {}
        self._lock = threading.Lock()

    def admit(self, kind: str, now: float) -> bool:
        """Whether one more of this kind is admitted at `now` (seconds); callable from any thread."""
        with self._lock:
            left, since = self._left.get(kind, (float(self._burst), now))
            left = min(float(self._burst), left + (now - since) * self._rate)
            self._left[kind] = (max(0.0, left - 1) if left >= 1 else left), now
            if left >= 1:
                return True
            self._refused[kind] = self._refused.get(kind, 0) + 1
            return False

    def refused(self, kind: str) -> int:
        """Return how many of this kind were refused since the last call."""
        with self._lock:
            return self._refused.pop(kind, 0)


class Journal:
    """Publishes events and metrics in the background.

    A flood of events of one kind, such as one a malformed message, is limited; the event `suppressed` counts those left
    out. Long texts lose their middle. A publication is retried for `patience` seconds before it is logged as lost, or
    forever.
    """

    def __init__(
        self, connection: Connection, subjects: Subjects, role: str, n: int, patience: float | None = PATIENCE
    ) -> None:
        self._connection = connection
        self.subjects = subjects
        self._role, self._n, self._patience = role, n, patience
        self._unsettled: set[concurrent.futures.Future[Any]] = set()
        self._limiter = RateLimiter()
        self._reporting: set[str] = set()

    def event(self, kind: str, *, role: str | None = None, n: int | None = None, **fields: Any) -> None:
        """Publish an event (`started`, `ready`, `crashed`, ...), from any thread."""
        if not self._limiter.admit(kind, time.monotonic()):
            if kind not in self._reporting:
                self._reporting.add(kind)
                self._submit(self._report(kind))
            return
        role, n = role or self._role, self._n if n is None else n
        fields = {name: truncate(value) for name, value in fields.items()}
        log.info(kind, role=role, n=n, **fields)
        self._publish(self.subjects.event(role, n, kind), {"kind": kind, "role": role, "n": n, **fields})

    async def _report(self, kind: str) -> None:
        await asyncio.sleep(REPORT_SECONDS)
        self._reporting.discard(kind)
        self.event("suppressed", of=kind, count=self._limiter.refused(kind), seconds=REPORT_SECONDS)

    def metric(self, values: dict[str, Any]) -> None:
        """Publish measurements of this actor as one message; callable from any thread."""
        self._publish(self.subjects.metric(self._role, self._n), {**values, "role": self._role, "n": self._n})

    def _publish(self, subject: str, body: dict[str, Any]) -> None:
        at = round(time.time(), 3)
        try:
            data = json.dumps({"time": at, **body}, default=str).encode()
        except (ValueError, RecursionError) as error:
            data = json.dumps({"time": at, "kind": body.get("kind"), "unwritable": str(error)[:200]}).encode()
        if len(data) > MAX_BYTES:
            # A character that is not ASCII takes up to 12 bytes.
            short = {name: truncate(value, SHORT_TEXT) for name, value in body.items()}
            data = json.dumps({"time": at, **short}, default=str).encode()
        if len(data) > MAX_BYTES:
            data = json.dumps({"time": at, "kind": body.get("kind"), "too_long": len(data)}).encode()
        self._submit(self._send(subject, data))

    def _submit(self, work: Any) -> None:
        try:
            future = self._connection.submit(work)
        except RuntimeError:  # the loop is closed at the very end of a process
            work.close()
            return
        self._unsettled.add(future)
        future.add_done_callback(self._unsettled.discard)

    def flush(self, seconds: float) -> bool:
        """Wait until all events and metrics are stored; False if some are not after `seconds`."""
        return not concurrent.futures.wait(tuple(self._unsettled), seconds).not_done

    async def _send(self, subject: str, data: bytes) -> None:
        headers = {"Nats-Msg-Id": uuid.uuid4().hex}

        async def publish() -> None:
            await self._connection.js.publish(subject, data, headers=headers)

        try:
            await self._connection.retry(publish, f"publish {subject}", self._patience)
        except (BrokerError, APIError, nats.errors.Error) as error:
            log.warning("journal_lost", subject=subject, error=str(error))


def truncate(value: Any, length: int = MAX_TEXT) -> Any:
    """Cut a field of an event; a text above `length` keeps its beginning and its end."""
    if isinstance(value, str) and len(value) > length:
        half = length // 2
        return f"{value[:half]} ... {len(value) - 2 * half} characters left out ... {value[-half:]}"
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        return [*value[:MAX_ITEMS], f"and {len(value) - MAX_ITEMS} more"]
    return value
