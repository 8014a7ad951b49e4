"""Requests to sessions whose row has ended, at a real gateway: refused at once, and holding no slot of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from broker.connection import Connection
from broker.permissions import OPERATOR
from broker.server import Server
from broker.store import Store
from broker.streams import ensure_streams, log_spec, table_spec
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.messages import Dropped, DropReason, Prompt
from relax_actors.messages.generate import GenerateCall, Refusal, SessionCall
from relax_actors.roles import table_kinds
from relax_actors.runtime.cells import MAX_END_BYTES
from relax_actors.serving.answers import Answers, Limits
from relax_actors.serving.app import Access, Gateway
from relax_actors.serving.errors import ApiError
from relax_actors.serving.listening import listen
from relax_actors.serving.run_policy import EndedRows, RunPolicy
from relax_actors.serving.server import HttpServer
from relax_actors.serving.session_client import AgentResult, AgentTask, SessionClient, SessionGoneError
from relax_actors.serving.tokens import session_token
from tests.support.contexts import context_of
from tests.support.running import SUPPORT, wait_until

TOKEN, SECRET = "t" * 16, "secret"
ROW = RowId(3, 1)
SESSION = "group-3-1-0-0"
ASK = {"messages": [{"role": "user", "content": "say 7"}]}
AT_ONCE = 15.0
"""Seconds for an answer; a request that waits for its row does so for a minute."""
GONE = f"session '{SESSION}' is over: its row has ended"


@pytest.fixture
def client(table: Table, tmp_path: Path) -> Iterator[httpx.Client]:
    """Client of a gateway without rollout actors, which works on two requests at once, for up to a minute."""
    context = context_of(table, tmp_path, "gateway", (), 1, SUPPORT / "tiny_agents.toml")
    limits = Limits(1 << 20, 2, 60.0)

    async def serve() -> HttpServer:
        answers = Answers(RunPolicy(context), Tokenizer(context.config.model_path), "policy", 256, limits)
        listener = listen("127.0.0.1", 0)
        server = HttpServer(Gateway(answers, Access((TOKEN,), SECRET), limits).app(), listener, None, 64)
        await server.start()
        return server

    server = table.connection.call(serve(), 20)
    with httpx.Client(base_url=server.url, timeout=20) as found:
        yield found
    table.connection.call(server.stop(lambda: None), 20)


def post(client: httpx.Client, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    head = {"Authorization": f"Bearer {session_token(SECRET, SESSION)}"}
    return client.post(f"/sessions/{SESSION}{path}", headers=head, json=body or {})


def test_requests_to_a_session_whose_row_has_ended_are_refused_at_once(table: Table, client: httpx.Client) -> None:
    for _ in range(2):  # the gateway works on two requests at once
        for path, body in (("/v1/chat/completions", ASK), ("/keep", {}), ("/end", {"reward": 1.0})):
            started = time.monotonic()
            answer = post(client, path, body)
            assert time.monotonic() - started < AT_ONCE
            assert (answer.status_code, answer.json()["error"]["message"]) == (410, GONE)
            assert "Retry-After" not in answer.headers
    gone = post(client, "/v1/messages", {"max_tokens": 4, **ASK})
    assert (gone.status_code, gone.json()["error"]["message"]) == (410, GONE)
    assert client.get("/v1/models", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200

    async def end() -> None:
        sessions = SessionClient(str(client.base_url), TOKEN)
        try:
            task = AgentTask(SESSION, "", "", session_token(SECRET, SESSION), {}, 60.0)
            with pytest.raises(SessionGoneError, match="its row has ended"):
                await sessions.end(task, AgentResult(1.0))
        finally:
            await sessions.close()

    started = time.monotonic()
    table.connection.call(end(), 30)
    assert time.monotonic() - started < AT_ONCE, "the client repeats a request that can never succeed"


def test_request_waits_for_the_actor_of_its_row_until_the_row_ends(table: Table, client: httpx.Client) -> None:
    assert table.put(table.subject(ROW, "prompt"), Prompt("say 7", np.array([1, 2], np.int32), "", {}, 0, 0))
    found: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: found.append(post(client, "/v1/chat/completions", ASK)))
    asking.start()
    asking.join(1.5)
    assert asking.is_alive(), "the row's actor may be restarting"
    assert table.put(table.subject(ROW, "dropped"), Dropped(DropReason.TRUNCATED, "a test"))
    asking.join(5)
    assert [(answer.status_code, answer.json()["error"]["message"]) for answer in found] == [(410, GONE)]


def test_cell_that_ends_no_row_does_not_end_its_session(table: Table) -> None:
    assert table.put(table.subject(ROW, "prompt"), Prompt("say 7", np.array([1, 2], np.int32), "", {}, 0, 0))
    subject = table.subject(ROW, "dropped")
    table.put_encoded([(subject, bytes(MAX_END_BYTES + 1))])  # the trainer removes it
    rows = EndedRows(table)
    assert not table.connection.call(rows.has(ROW, 0.0), 20)
    cell = table.get(subject)
    assert cell is not None
    table.remove([cell])
    assert table.put(subject, Dropped(DropReason.TRUNCATED, "a test"))
    assert table.connection.call(rows.has(ROW, 100.0), 20)


def test_malformed_id_of_a_session_is_called_so(table: Table, tmp_path: Path) -> None:
    policy = RunPolicy(context_of(table, tmp_path, "gateway", (), 1, SUPPORT / "tiny_agents.toml"))
    detail = "session 'group-3' does not exist: it is no id of a session; use the one that POST /sessions returned"
    kept = table.connection.call(policy.session(SessionCall("keep", "group-3")), 10)
    assert (kept.refusal, kept.detail) == (Refusal.ENDED, detail)
    asked = table.connection.call(policy.generate(GenerateCall("c", session="group-3", seconds=30)), 10)
    assert (asked.refusal, asked.detail) == (Refusal.ENDED, detail)


def test_request_ends_in_its_time_while_the_broker_is_down(tmp_path: Path) -> None:
    server = Server(tmp_path / "broker")
    address = server.start().for_user(OPERATOR)
    with closing(Connection(address, "test")) as connection:
        subjects = Subjects("t1")
        streams = [table_spec(subjects, table_kinds(), 1 << 26), log_spec(subjects, 1 << 24, 3600)]
        connection.call(ensure_streams(connection, streams), 20)
        table = Table(connection, subjects, Store(tmp_path / "store"), "test.0#1")
        policy = RunPolicy(context_of(table, tmp_path, "gateway", (), 1, SUPPORT / "tiny_agents.toml"))
        server.stop()
        wait_until(lambda: not connection.nc.is_connected, "loss of the connection")
        with pytest.raises(ApiError) as caught:
            connection.call(policy.generate(GenerateCall("c", session=SESSION, seconds=1)), 10)
    assert (caught.value.status, str(caught.value)) == (
        504,
        "no rollout actor answered within 1 s; send the request again later",
    )
