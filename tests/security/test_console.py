"""The console answers its own page with a valid token, and nobody else; what a model wrote stays text."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from broker.subjects import RowId
from relax_actors.console.app import Console
from relax_actors.console.guard import HEADERS, Tokens
from relax_actors.console.query import Operation
from relax_actors.console.runs import ConsoleRuns
from tests.support.consoles import WrittenRun
from tests.support.hostile_markup import PAYLOADS

OBSERVER, OPERATOR = "observer-token", "operator-token"
BEARER = {"Authorization": f"Bearer {OBSERVER}"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WrittenRun]:
    run = WrittenRun(tmp_path_factory.mktemp("hostile"))
    run.train(range(1))
    for n, payload in enumerate(PAYLOADS):
        run.quarantine(RowId(1, 2 * n), payload, payload, role=payload)
        run.journal("reward").event("row_failed", row="group.1.0", reason=payload)
        # No actor has such a name, and no client of the broker can make one of it.
        role = re.sub(r"[\s.*>]", "_", payload)
        subject = run.subjects.event(role, 0, "ready")
        run.connection.call(run.connection.js.publish(subject, b'{"seconds": 1.0}'), 10)
    assert run.trainer.flush(10)
    yield run
    run.stop()


def requested(
    run: WrittenRun, method: str, path: str, headers: Mapping[str, str], body: Any = None, done: list[Any] | None = None
) -> httpx.Response:
    """Answer of a console to one request; operations are recorded in `done`."""

    def operate(_run: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if done is not None:
            done.append(given)
        return {"done": True}

    async def main() -> httpx.Response:
        operations: dict[str, Operation] = {"scale": operate}
        runs = ConsoleRuns(str(run.folder.root))
        app = Console(runs, operations).app(Tokens(OBSERVER, OPERATOR), ("console.example",))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app, raise_app_exceptions=False), base_url="http://127.0.0.1:8090"
        ) as client:
            request = client.build_request(method, "http://127.0.0.1:8090/", headers=headers, json=body)
            request.url = httpx.URL("http://127.0.0.1:8090").copy_with(raw_path=path.encode())
            try:
                return await client.send(request)
            finally:
                await runs.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Basic {OBSERVER}"}, 401),
        ({"Authorization": f"Bearer {OBSERVER}x"}, 401),
        ({"Cookie": f"token={OBSERVER}"}, 401),
        (BEARER, 200),
        ({"Authorization": f"Bearer {OPERATOR}"}, 200),
        (BEARER | {"Host": "localhost:8090"}, 200),
        (BEARER | {"Host": "console.example"}, 200),
        (BEARER | {"Host": "evil.example:8090"}, 421),
        (BEARER | {"Host": "127.0.0.1.evil.example"}, 421),
        (BEARER | {"Host": "[::1"}, 421),
        (BEARER | {"Origin": "http://127.0.0.1:8090"}, 200),
        (BEARER | {"Origin": "http://127.0.0.1:9999"}, 403),
        (BEARER | {"Origin": "https://evil.example"}, 403),
        (BEARER | {"Origin": "null"}, 403),
    ],
)
def test_only_known_hosts_origins_and_tokens_get_answers(run: WrittenRun, headers: dict[str, str], status: int) -> None:
    answer = requested(run, "GET", "/api/session", headers)
    assert answer.status_code == status, answer.text
    assert answer.headers.items() >= {name.lower(): value for name, value in HEADERS.items()}.items()
    if status != 200:
        assert run.name not in answer.text


def test_operations_need_the_token_of_an_operator(run: WrittenRun) -> None:
    done: list[Any] = []
    for token, status in (("wrong", 401), (OBSERVER, 403), (OPERATOR, 200)):
        head = {"Authorization": f"Bearer {token}"}
        assert requested(run, "POST", "/api/scale", head, {"role": "rollout"}, done).status_code == status
    assert done == [{"role": "rollout"}]
    assert requested(run, "POST", "/api/other", {"Authorization": f"Bearer {OPERATOR}"}, {}, done).status_code == 404
    assert requested(run, "DELETE", "/api/run", {"Authorization": f"Bearer {OPERATOR}"}).status_code == 405
    assert requested(run, "POST", "/api/scale", {"Authorization": f"Bearer {OPERATOR}"}, [1], done).status_code == 400


@pytest.mark.parametrize(
    "path",
    [
        "/../app.py",
        "/%2e%2e/app.py",
        "/..%2fapp.py",
        "/lib/..%2f..%2fguard.py",
        "//etc/passwd",
        "/%2fetc%2fpasswd",
        "/..%5capp.py",
        "/vendor/../../app.py",
        "/lib/%00",
    ],
)
def test_no_path_leads_out_of_the_page(run: WrittenRun, path: str) -> None:
    answer = requested(run, "GET", path, {})
    assert answer.status_code == 404, answer.text
    assert "import" not in answer.text
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    "path", ["/api/run?run=../../etc", "/api/run?run=%00", "/api/curves?first=-1&run=", "/api/x/y"]
)
def test_malformed_requests_are_refused(run: WrittenRun, path: str) -> None:
    assert requested(run, "GET", path, BEARER).status_code in (400, 404)


def test_payloads_arrive_as_json(run: WrittenRun) -> None:
    answer = requested(run, "GET", "/api/ledger", BEARER)
    assert answer.headers["content-type"] == "application/json"
    for name in ("error", "role", "trace"):
        assert {row[name] for row in answer.json()["quarantined"]} == set(PAYLOADS)
    texts = [event["text"] for event in requested(run, "GET", "/api/events", BEARER).json()["events"]]
    assert len(texts) == len(PAYLOADS)


def test_role_that_is_no_name_is_no_actor(run: WrittenRun) -> None:
    nodes = requested(run, "GET", "/api/actors", BEARER).json()["nodes"]
    assert [actor["name"] for node in nodes for actor in node["actors"]] == []
    events = requested(run, "GET", "/api/events", BEARER).json()["events"]
    assert {event["sender"] for event in events} == {"reward.0"}


def test_link_can_be_read_by_its_user_only(tmp_path: Path) -> None:
    from relax_actors.console.link import link_file, load_link, open_link

    link, listener = open_link(tmp_path)
    listener.close()
    assert link_file(tmp_path).stat().st_mode & 0o777 == 0o600
    again, listener = open_link(tmp_path)
    listener.close()
    assert again == load_link(tmp_path)
    # The port was free for a moment, so another user may have got the tokens of a browser at the old link.
    assert again.port == link.port
    assert len({link.observer, link.operator, again.observer, again.operator}) == 4
    link_file(tmp_path).write_text('{"port": "x"}')
    assert load_link(tmp_path) is None


class Squatter(BaseHTTPRequestHandler):
    """Answers every request as another user could who listens at the recorded port."""

    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(f"{self.path} {self.headers}")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"run": "seen"}')

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(port: int, handler: type[BaseHTTPRequestHandler]) -> Iterator[None]:
    """Answer requests at a port."""
    server = HTTPServer(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_token_is_not_sent_to_whom_the_port_belongs_now(tmp_path: Path) -> None:
    from relax_actors.console.link import is_console, open_link

    link, listener = open_link(tmp_path)
    listener.close()
    with served(link.port, Squatter):
        assert not is_console(link)
        assert len(Squatter.seen) == 1
        assert link.observer not in Squatter.seen[0]
        again, listener = open_link(tmp_path)
        listener.close()
        assert again.port != link.port


class Sluggard(BaseHTTPRequestHandler):
    """Sends a piece of an answer now and then, for 10 s or until the client leaves."""

    left = threading.Event()

    def do_GET(self) -> None:
        self.wfile.write(b"HTTP/1.1 ")
        try:
            for _ in range(100):
                self.wfile.write(b"100 Continue\r\n\r\nHTTP/1.1 ")
                self.left.wait(0.1)
        except OSError:
            self.left.set()

    def log_message(self, *_: Any) -> None:
        pass


def test_port_whose_owner_answers_piece_by_piece_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_actors.console import link as links

    monkeypatch.setattr(links, "PROOF_SECONDS", 0.5)
    link, listener = links.open_link(tmp_path)
    listener.close()
    with served(link.port, Sluggard):
        assert not links.is_console(link)
    assert Sluggard.left.is_set()


def test_console_proves_that_it_holds_the_token(run: WrittenRun) -> None:
    from relax_actors.console.link import proof

    nonce = "n" * 32
    answer = requested(run, "GET", f"/proof?nonce={nonce}", {})
    assert answer.status_code == 200
    assert answer.text == proof(OBSERVER, 8090, nonce)
    assert OBSERVER not in answer.text
    assert requested(run, "GET", "/proof?nonce=short", {}).status_code == 400
    assert requested(run, "GET", f"/proof?nonce={nonce}", {"Host": "evil.example"}).status_code == 421


def test_browser_is_given_no_token(tmp_path: Path) -> None:
    from relax_actors.console.link import Link, write_redirect

    link = Link(4000, "o" * 32, "p" * 32)
    address = write_redirect(tmp_path, link.url(operator=True))
    assert link.operator not in address
    page = Path(address.removeprefix("file://"))
    assert page.stat().st_mode & 0o777 == 0o600
    assert link.url(operator=True) in page.read_text()
