"""Who may use the console: hosts, origins and tokens; and the headers that keep a page of another origin away.

The token stands in the fragment of the printed link, which a browser sends to no server. The page sends it as a bearer
token, never as a cookie, so no other page can have the browser send it.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relax_actors.console.errors import RequestError
from relax_actors.serving.tokens import is_any

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; object-src 'none'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Bearer tokens of a console.

    Attributes:
        observer: permits reading.
        operator: permits reading, and the operations that change the run.
    """

    observer: str
    operator: str

    def may_read(self, given: str) -> bool:
        """Whether a token permits reading."""
        return is_any(given, (self.observer, self.operator))

    def may_write(self, given: str) -> bool:
        """Whether a token permits operations."""
        return is_any(given, (self.operator,))


class Guard:
    """Application that answers requests for known hosts, from pages of its own origin, with a token below `/api/`.

    A web page can have its own name resolve to 127.0.0.1; its requests then name that host and are refused. Browsers
    reach the console by the names of the loopback address, and by `hosts`.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, hosts: tuple[str, ...] = ()) -> None:
        self._app, self._tokens, self._hosts = app, tokens, {*LOOPBACK, *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            self._check(scope)
        except RequestError as error:
            await error.response()(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if _name_of(host) not in self._hosts:
            msg = f"host {host[:100]!r} is none of this console; open its link, or allow the host with --allow-host"
            raise RequestError(421, msg, "unknown_host")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            msg = f"a page of origin {origin[:100]!r} may not use this console; open the link that it printed"
            raise RequestError(403, msg, "foreign_origin")
        if not str(scope["path"]).startswith("/api/"):
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        given = given if kind.lower() == "bearer" else ""
        if not self._tokens.may_read(given):
            msg = "no valid token; open the link that the console printed, which has its token"
            raise RequestError(401, msg, "invalid_token")
        scope["may_write"] = self._tokens.may_write(given)
        if scope["method"] not in ("GET", "HEAD") and not scope["may_write"]:
            msg = "this token permits reading only; start the console with --operator, and open the link that it prints"
            raise RequestError(403, msg, "read_only")


def _name_of(host: str) -> str:
    """Return the name of a Host header without its port, in lower case; empty if it is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
