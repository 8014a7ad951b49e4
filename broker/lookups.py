"""Direct look-ups of stored messages: without a consumer, and many at once in one request."""

from __future__ import annotations

import json
from typing import NamedTuple

from nats.aio.msg import Msg

from broker.permissions import API
from broker.requests import Requests

MAX_SUBJECTS = 256
"""Most subjects of one request; the server answers at most 1,024."""
MAX_ANSWER_BYTES = 16 << 20
"""Bytes after which an answer ends, more than the largest message has. The server closes a connection that is 64 MiB
behind, and one answer must arrive within the time of a request."""
_END = ("204", "404")


class Stored(NamedTuple):
    """A stored message."""

    subject: str
    sequence: int
    data: bytes


class UnreadableAnswerError(ValueError):
    """An answer with unreadable headers: those of a stored message, which may be too long."""


async def look_up(requests: Requests, stream: str, subject: str) -> Stored | None:
    """Return the last message of a stream that a subject or filter matches, or None.

    Raises UnreadableAnswerError if the answer cannot be read (ask the stream's leader), and as `Requests.send`.
    """
    (stored,) = await (await requests.send(f"{API}.DIRECT.GET.{stream}.{subject}", b"", lambda m: (_stored(m),)))
    return stored


async def look_up_all(requests: Requests, stream: str, subjects: list[str]) -> dict[str, Stored]:
    """Return the messages of a stream on some subjects, by subject; missing ones are left out.

    A message that is missing may exist: one whose headers cannot be read is skipped.

    Raises:
        UnreadableAnswerError: the server refuses the request.
        nats.errors.Error: no answer; see `Requests.send`.
    """
    stored: dict[str, Stored] = {}
    for begin in range(0, len(subjects), MAX_SUBJECTS):
        wanted = subjects[begin : begin + MAX_SUBJECTS]
        is_whole = False
        while wanted and not is_whole:
            answer, is_whole = await _look_up_some(requests, stream, wanted)
            stored |= answer
            wanted = [subject for subject in wanted if subject not in answer]
            is_whole = is_whole or not answer
    return stored


async def _look_up_some(requests: Requests, stream: str, subjects: list[str]) -> tuple[dict[str, Stored], bool]:
    """Return the messages of one answer, and whether the answer is complete."""
    messages: dict[str, Stored] = {}

    def take(message: Msg) -> tuple[dict[str, Stored], bool] | None:
        headers = message.headers
        if headers is None:
            return None  # of a stored message, as those of the end are short
        if "Nats-Stream" in headers:
            stored = _stored(message)
            if stored is not None:
                messages[stored.subject] = stored
            return None
        if headers.get("Status") not in _END:
            raise UnreadableAnswerError(headers.get("Description", "no status"))
        return messages, headers.get("Nats-Num-Pending", "0") == "0"

    wanted = json.dumps({"multi_last": subjects, "max_bytes": MAX_ANSWER_BYTES}).encode()
    return await (await requests.send(f"{API}.DIRECT.GET.{stream}", wanted, take))


def _stored(message: Msg) -> Stored | None:
    # The headers of a stored message may imitate those of the server, which come last and count.
    headers = message.headers or {}
    if "Nats-Stream" in headers:
        return Stored(headers["Nats-Subject"], int(headers["Nats-Sequence"]), message.data)
    if not message.data and headers.get("Status") == "404":
        return None
    msg = f"answer with status {headers.get('Status')} and {len(message.data)} bytes"
    raise UnreadableAnswerError(msg)
