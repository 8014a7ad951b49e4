"""Events and metrics of an actor: JSON on the log's stream, readable as they are."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from typing import Any

import structlog
from nats.js.errors import APIError

from broker.bridge import Bridge
from broker.subjects import Subjects
from relax_actors.errors import BrokerError

log = structlog.get_logger()
PATIENCE = 30.0


class Journal:
    """Publishes in the background; what cannot be stored within `PATIENCE` seconds is logged and let go."""

    def __init__(self, bridge: Bridge, subjects: Subjects, role: str, n: int) -> None:
        self._bridge = bridge
        self.subjects = subjects
        self._role, self._n = role, n

    def event(self, kind: str, *, role: str | None = None, n: int | None = None, **fields: Any) -> None:
        """Something happened: `started`, `ready`, `crashed`, `row_quarantined`, ...; from any thread."""
        role, n = role or self._role, self._n if n is None else n
        log.info(kind, role=role, n=n, **fields)
        self._publish(self.subjects.event(role, n, kind), {"kind": kind, "role": role, "n": n, **fields})

    def metric(self, values: dict[str, Any]) -> None:
        """Measurements of this actor, one object a message; from any thread."""
        self._publish(self.subjects.metric(self._role, self._n), {"role": self._role, "n": self._n, **values})

    def _publish(self, subject: str, body: dict[str, Any]) -> None:
        data = json.dumps({"time": round(time.time(), 3), **body}, default=str).encode()
        with contextlib.suppress(RuntimeError):  # the loop is closed at the very end of a process
            self._bridge.submit(self._send(subject, data))

    async def _send(self, subject: str, data: bytes) -> None:
        headers = {"Nats-Msg-Id": uuid.uuid4().hex}

        async def publish() -> None:
            await self._bridge.js.publish(subject, data, headers=headers)

        try:
            await self._bridge.persist(publish, f"publish {subject}", PATIENCE)
        except (BrokerError, APIError) as error:
            log.warning("journal_lost", subject=subject, error=str(error))
