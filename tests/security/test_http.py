"""Malformed, slow and huge requests to the endpoint of Prometheus: answered or closed in bounded time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from relax_actors.errors import ConfigError
from relax_actors.monitoring.sinks import metrics_server
from relax_actors.monitoring.sinks.metrics_server import MAX_CLIENTS, MetricsServer
from tests.support.messages import assert_says
from tests.support.running import wait_until

PAGE = b"relax_step_reward 0.25\n"
OK, BAD, NOTHING = b"200", b"4", b""
"""Beginnings of the status of an answer; `NOTHING` is a connection closed without one."""
REQUESTS = {
    "plain": (b"GET /metrics HTTP/1.0\r\n\r\n", OK),
    "query": (b"GET /metrics?name[]=x&y=%00 HTTP/1.1\r\nHost: localhost\r\n\r\n", OK),
    "loopback by number": (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9108\r\n\r\n", OK),
    "loopback of version 6": (b"GET /metrics HTTP/1.1\r\nHost: [::1]:9108\r\n\r\n", OK),
    "name that was rebound": (b"GET /metrics HTTP/1.1\r\nHost: evil.invalid\r\n\r\n", b"421"),
    "host that is none": (b"GET /metrics HTTP/1.1\r\nHost: [::::\r\n\r\n", b"421"),
    "host twice": (b"GET /metrics HTTP/1.1\r\nHost: evil.invalid\r\nHost: localhost\r\n\r\n", b"421"),
    "other path": (b"GET / HTTP/1.0\r\n\r\n", b"404"),
    "path upwards": (b"GET /../../../../etc/passwd HTTP/1.0\r\n\r\n", b"404"),
    "other server": (b"GET http://evil.invalid/metrics HTTP/1.0\r\n\r\n", b"404"),
    "POST": (b"POST /metrics HTTP/1.0\r\nContent-Length: 9\r\n\r\n123456789", b"501"),
    "CONNECT": (b"CONNECT evil.invalid:80 HTTP/1.0\r\n\r\n", b"501"),
    "method of a page": (b"X" * 4000 + b" / HTTP/1.0\r\n\r\n", b"501"),
    "nothing": (b"", NOTHING),
    "empty lines": (b"\r\n\r\n\r\n", NOTHING),
    "no version": (b"GET /metrics\r\n", OK),
    "one word": (b"GET\r\n\r\n", BAD),
    "many words": (b"GET a b c d HTTP/1.0\r\n\r\n", BAD),
    "unknown version": (b"GET /metrics HTTP/9.9\r\n\r\n", b"505"),
    "version that is none": (b"GET /metrics HTTP/x.y\r\n\r\n", BAD),
    "version of a thousand digits": (b"GET /metrics HTTP/1." + b"1" * 1000 + b"\r\n\r\n", BAD),
    "beginning of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
    "beginning of TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xff" * 100 + b"\r\n\r\n", BAD),
    "zeros": (b"\0" * 500 + b"\r\n\r\n", BAD),
    "escapes": (b"GET /\x1b[31m\x9b HTTP/1.0\r\nX-\x1b]0;owned\x07: \x1b\r\n\r\n", b"404"),
    "header that is none": (b"GET /metrics HTTP/1.0\r\nno colon\r\n\r\n", OK),
    "folded header": (b"GET /metrics HTTP/1.0\r\nA: b\r\n  c\r\n\r\n", OK),
    "line feeds only": (b"GET /metrics HTTP/1.0\n\n", OK),
    "split answer": (b"GET /%0d%0aSet-Cookie:a HTTP/1.0\r\n\r\n", b"404"),
    "a hundred and one headers": (b"GET /metrics HTTP/1.0\r\n" + b"A: b\r\n" * 101 + b"\r\n", BAD),
    "header of many bytes": (b"GET /metrics HTTP/1.0\r\nA: " + b"b" * (1 << 20) + b"\r\n\r\n", NOTHING),
    "path of many bytes": (b"GET /" + b"a" * (1 << 20) + b" HTTP/1.0\r\n\r\n", NOTHING),
    "two requests": (b"GET /metrics HTTP/1.1\r\nConnection: keep-alive\r\n\r\n" * 2, OK),
}


@pytest.fixture(scope="module")
def server() -> Iterator[MetricsServer]:
    found = MetricsServer("0", lambda: PAGE)
    yield found
    found.shutdown()
    found.server_close()


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(server.server_address[:2], timeout=20)


def answer_to(server: MetricsServer, request: bytes) -> bytes:
    """Send a request and no more; return the whole answer."""
    with connect(server) as connection:
        with suppress(OSError):  # the server may close the connection before it has read everything
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
        return rest(connection)


def rest(connection: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            found += data
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_any_request_gets_an_answer_or_is_closed(
    server: MetricsServer, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    request, wanted = REQUESTS[name]
    began = time.monotonic()
    found = answer_to(server, request)
    assert time.monotonic() - began < 10
    assert (PAGE in found) == (wanted == OK)
    if found.startswith(b"HTTP/"):  # else closed, or an answer as of HTTP/0.9
        assert wanted != NOTHING
        assert found.split()[1].startswith(wanted)
    assert b"\x1b" not in found
    assert b"\r\nSet-Cookie" not in found
    assert answer_to(server, b"GET /metrics HTTP/1.0\r\n\r\n").endswith(PAGE)
    assert capsys.readouterr() == ("", "")


def test_slow_requests_end_after_seconds(monkeypatch: pytest.MonkeyPatch, server: MetricsServer) -> None:
    monkeypatch.setattr(metrics_server, "MAX_SECONDS", 0.5)
    with connect(server) as silent, connect(server) as trickling:
        trickling.sendall(b"GET /metrics HTTP/1.0\r\n")

        def is_closed() -> bool:
            try:
                trickling.sendall(b"A: b\r\n")
            except OSError:
                return True
            return False

        wait_until(is_closed, "end of a request that never ends")
        assert rest(silent) == b""


def test_header_of_100_megabytes_is_not_read(server: MetricsServer) -> None:
    sent = 0
    with connect(server) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\nA: ")
        with suppress(OSError):
            while sent < 100 << 20:
                connection.sendall(b"b" * (1 << 16))
                sent += 1 << 16
    assert sent < 30 << 20  # what the buffers of the two sockets hold


def test_many_clients_do_not_add_threads_and_leave_room_again(server: MetricsServer) -> None:
    before = threading.active_count()
    with ExitStack() as opened:
        for _ in range(4 * MAX_CLIENTS):
            with suppress(OSError):
                opened.enter_context(connect(server))
        assert threading.active_count() <= before + MAX_CLIENTS
    wait_until(lambda: PAGE in answer_to(server, b"GET /metrics HTTP/1.0\r\n\r\n"), "an answer")


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])  # noqa: S104 it is refused
def test_public_address_is_refused_unless_marked(host: str) -> None:
    target = f"{host}:0"
    with pytest.raises(ConfigError) as caught:
        MetricsServer(target, lambda: PAGE)
    assert_says(caught.value, f"--sink prometheus={target}", "loopback", f"prometheus=public:{target}")
    server = MetricsServer(f"public:{target}", lambda: PAGE)
    try:
        with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: relax.example\r\n\r\n")
            assert rest(connection).endswith(PAGE)
    finally:
        server.shutdown()
        server.server_close()


def test_loopback_is_the_default() -> None:
    for target in ("0", ":0", "localhost:0", "127.0.0.1:0"):
        server = MetricsServer(target, lambda: PAGE)
        assert server.server_address[0] in ("127.0.0.1", "::1")
        server.shutdown()
        server.server_close()


NO_TARGETS = ("", "x", "-1", "65536", "1:2:3:99999", "a" * 10_000 + ":1", "\0:1", "²", "1e3", ":")


@pytest.mark.parametrize("target", NO_TARGETS)
def test_target_that_is_no_address_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)^--sink prometheus=.*; (give a free port|write prometheus=9108), or "):
        MetricsServer(target, lambda: PAGE)
