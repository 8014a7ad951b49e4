"""Leases of a live run as an observer hears them: supervisors and actors renew them about once a second."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg

from broker.lease_entries import lease_of
from broker.permissions import bucket_key
from broker.subjects import Subjects

MAX_LEASES = 4096


@dataclass
class LeaseBook:
    """Current leases, by `<role>.<n>`; entries that are no leases are told apart.

    Attributes:
        leases: state of each lease, and until when it lasts, in seconds of the monotonic clock.
        forged: why an entry under the key of a lease is ignored.
    """

    subjects: Subjects
    leases: dict[str, tuple[dict[str, Any], float]] = field(default_factory=dict)
    forged: dict[str, str] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """Subject of all leases."""
        return bucket_key(self.subjects, "lease.>")

    async def take(self, message: Msg) -> None:
        """Record the renewal or the end of a lease."""
        key = message.subject.removeprefix(bucket_key(self.subjects, ""))
        name, headers = key.removeprefix("lease."), message.headers or {}
        if "KV-Operation" in headers or "Nats-Marker-Reason" in headers:
            self.leases.pop(name, None)
            self.forged.pop(name, None)
            return
        state = lease_of(key, message.data, headers)
        if len(self.leases) + len(self.forged) >= MAX_LEASES and name not in self.leases and name not in self.forged:
            return
        if isinstance(state, str):
            self.forged[name] = state
            return
        self.forged.pop(name, None)
        self.leases[name] = state, time.monotonic() + float(headers["Nats-TTL"])

    def current(self) -> dict[str, dict[str, Any]]:
        """Return the leases that last."""
        now = time.monotonic()
        return {name: state for name, (state, until) in self.leases.items() if until > now}
