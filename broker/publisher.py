"""Publication of messages to streams, and the server's acknowledgements."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from nats.aio.msg import Msg
from nats.js.errors import APIError

from broker.requests import Requests


async def publish(requests: Requests, subject: str, data: bytes) -> asyncio.Future[dict[str, Any]]:
    """Publish a message to a stream and return the future of its acknowledgement, without waiting for it.

    The future raises `APIError` if the stream refuses the message, and the errors of `Requests.send`.
    """
    return await requests.send(subject, data, _acknowledgement)


def _acknowledgement(message: Msg) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(message.data)
    if "error" in body:
        APIError.from_error(body["error"])  # raises it
    return body
