"""Attacks on the gateway: heads, bodies, methods, and sessions of other agents."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import pytest

from relax_actors.serving.answers import Limits
from relax_actors.serving.server import MAX_HEAD_BYTES
from relax_actors.serving.tokens import session_token
from tests.support.scripted_policy import SECRET, TOKEN, serve

HEAD = {"Authorization": f"Bearer {TOKEN}"}
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}]}
OWN, OTHER = "group-0-0-0-0", "group-0-0-1-0"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    limits = Limits(max_body_bytes=64 << 10, max_concurrent=4, request_seconds=5.0)
    with serve(tmp_path_factory.mktemp("model"), lambda _: "Hello.", limits) as (found, _):
        yield found


def answer_to(url: str, raw: bytes) -> bytes:
    """Send bytes at once and return the whole answer; empty if the connection was closed without one."""
    parts, found = urlsplit(url), b""
    with socket.create_connection((parts.hostname, parts.port), 10) as connection, suppress(OSError):
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        while data := connection.recv(1 << 16):
            found += data
    return found


@pytest.mark.parametrize("size", [MAX_HEAD_BYTES + 1, 60_000, 120_000, 1 << 20])
@pytest.mark.parametrize("where", ["header", "path", "query"])
def test_head_over_the_limit_is_refused_however_it_arrives(url: str, size: int, where: str) -> None:
    long = b"a" * size
    path = {"header": b"/health", "path": b"/" + long, "query": b"/health?x=" + long}[where]
    header = b"X: " + long + b"\r\n" if where == "header" else b""
    answer = answer_to(url, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n")
    assert not answer or answer.split(b" ", 2)[1] in (b"400", b"431"), answer[:200]
    assert httpx.get(f"{url}/health").status_code == 200


def test_head_within_the_limit_is_accepted(url: str) -> None:
    assert httpx.get(f"{url}/health", headers={"X": "a" * (MAX_HEAD_BYTES - 1024)}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("DELETE", "/sessions", "POST"),
        ("PUT", f"/sessions/{OWN}/end", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
def test_wrong_method_gets_status_405_with_those_that_are_allowed(
    url: str, method: str, path: str, allowed: str
) -> None:
    answer = httpx.request(method, f"{url}{path}", headers=HEAD)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert sorted(answer.headers["Allow"].split(", ")) == sorted(allowed.split(", "))


@pytest.mark.slow
def test_token_opens_its_own_session_alone(url: str) -> None:
    own = {"Authorization": f"Bearer {session_token(SECRET, OWN)}"}
    assert httpx.post(f"{url}/sessions/{OWN}{CHAT}", headers=own, json=ASK).status_code == 200
    for session in (OTHER, f"{OWN}-", OWN.upper(), "group-0-0-0-1", "%67roup-0-0-1-0", "a" * 200):
        for path in (CHAT, "/v1/messages", "/v1/responses", "/tokenize", "/keep", "/end"):
            answer = httpx.post(f"{url}/sessions/{session}{path}", headers=own, json=ASK)
            assert answer.status_code == 403, (session, path)
        assert httpx.get(f"{url}/sessions/{session}", headers=own).status_code == 403
    for path in (CHAT, "/v1/messages", "/tokenize", "/sessions", "/inference/v1/generate"):
        assert httpx.post(f"{url}{path}", headers=own, json=ASK).status_code == 401, path
    assert httpx.post(f"{url}/sessions/{OWN}{CHAT}", headers=HEAD, json=ASK).status_code == 403


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer \xff", "Basic eDp4", "Bearer " + "a" * 5000])
def test_credentials_that_are_none_open_nothing(url: str, given: str) -> None:
    head = {"Authorization": given.encode("latin-1")}
    assert httpx.post(f"{url}{CHAT}", headers=head, json=ASK).status_code == 401
    assert httpx.post(f"{url}/sessions/{OWN}{CHAT}", headers=head, json=ASK).status_code == 403


def test_two_requests_in_one_are_not_smuggled_past_the_token(url: str) -> None:
    hidden = b"POST /sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    both = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % len(hidden)
    answer = answer_to(url, b"POST /health HTTP/1.1\r\nHost: x\r\n" + both + b"\r\n0\r\n\r\n" + hidden)
    statuses = [line.split(b" ")[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
    assert set(statuses) <= {b"400", b"401", b"405"}, answer
