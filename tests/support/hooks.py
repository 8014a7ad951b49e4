"""Webhook of a test: a real HTTP server that keeps what it is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.http_servers import serving


@dataclass
class Hook:
    """A webhook.

    Attributes:
        url: its address.
        status: what it answers.
        messages: what it got, in order.
    """

    url: str = ""
    status: int = 200
    messages: list[dict[str, Any]] = field(default_factory=list)

    def of(self, rule: str) -> list[dict[str, Any]]:
        """Messages of one rule."""
        return [message for message in self.messages if message["rule"] == rule]


@contextmanager
def hooked() -> Iterator[Hook]:
    """Serve a webhook on a free port of the loopback interface."""
    hook = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            hook.messages.append(body)
            self.send_response(hook.status)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with serving(Handler) as url:
        hook.url = f"{url}/secret-token"
        yield hook
