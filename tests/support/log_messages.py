"""Messages of a run's log, as a monitor reads them."""

from __future__ import annotations

import json
from typing import Any

from relax_actors.monitoring.log_message import LogMessage


def log_message(subject: str, body: dict[str, Any]) -> LogMessage:
    """The message with this body, e.g. on `event.rollout.0.ready`."""
    read = LogMessage.parse(f"relax.x.{subject}", json.dumps(body).encode())
    assert read is not None
    return read


def event(kind: str, role: str = "reward", n: int = 0, **fields: Any) -> LogMessage:
    """An event as the journal of an actor publishes it."""
    return log_message(f"event.{role}.{n}.{kind}", {"kind": kind, "role": role, "n": n, **fields})


def metric(role: str, n: int = 0, **fields: Any) -> LogMessage:
    """A metric as the journal of an actor publishes it."""
    return log_message(f"metric.{role}.{n}", {"role": role, "n": n, **fields})
