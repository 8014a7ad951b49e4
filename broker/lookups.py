"""Direct look-ups of stored messages: without a consumer, and many at once in one request."""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

from nats.aio.msg import Msg

from broker.permissions import API
from broker.requests import Requests

MAX_SUBJECTS = 256
"""Most subjects of one request; the server answers at most 1,024."""
_END = ("204", "404")


class Stored(NamedTuple):
    """A stored message."""

    subject: str
    sequence: int
    data: bytes


class UnreadableAnswerError(ValueError):
    """An answer whose headers cannot be read: those of a stored message come first, and may be too long."""


async def look_up(requests: Requests, stream: str, subject: str) -> Stored | None:
    """Return the last message of a stream that a subject or filter matches, or None.

    Raises:
        UnreadableAnswerError: the answer cannot be read; ask the stream's leader.
        nats.errors.Error: no answer; see `Requests.send`.
    """
    (found,) = await (await requests.send(f"{API}.DIRECT.GET.{stream}.{subject}", b"", lambda m: (_stored(m),)))
    return found


async def look_up_all(requests: Requests, stream: str, subjects: list[str]) -> dict[str, Stored]:
    """Return the messages of a stream on some subjects, by subject; those that were not found are missing.

    A message that is missing may exist: the server ends an answer that is too long, or skips a message whose headers
    cannot be read.

    Raises:
        UnreadableAnswerError: the server refuses the request.
        nats.errors.Error: no answer; see `Requests.send`.
    """
    found: dict[str, Stored] = {}

    def take(message: Msg) -> dict[str, Stored] | None:
        headers = message.headers
        if headers is None:
            return None  # of a stored message, as those of the end are short
        if "Nats-Stream" in headers:
            stored = _stored(message)
            if stored is not None:
                found[stored.subject] = stored
            return None
        if headers.get("Status") not in _END:
            raise UnreadableAnswerError(headers.get("Description", "no status"))
        return found

    sent = []
    for begin in range(0, len(subjects), MAX_SUBJECTS):
        wanted = json.dumps({"multi_last": subjects[begin : begin + MAX_SUBJECTS]}).encode()
        sent.append(await requests.send(f"{API}.DIRECT.GET.{stream}", wanted, take))
    await asyncio.gather(*sent)
    return found


def _stored(message: Msg) -> Stored | None:
    # The headers of a stored message may imitate those of the server, which come last and count.
    headers = message.headers or {}
    if "Nats-Stream" in headers:
        return Stored(headers["Nats-Subject"], int(headers["Nats-Sequence"]), message.data)
    if not message.data and headers.get("Status") == "404":
        return None
    msg = f"answer with status {headers.get('Status')} and {len(message.data)} bytes"
    raise UnreadableAnswerError(msg)
