"""Routes of operators on the gateway, with a real table and bucket: what they record, refuse and show."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from broker.connection import Connection
from broker.leases import RunState
from broker.streams import ensure_bucket
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.messages.operations import OperationPlan, OperationRequest
from relax_actors.operations import OperationLog, State
from relax_actors.serving.answers import Answers, Limits
from relax_actors.serving.app import Access, Gateway
from relax_actors.serving.control.control import Control, RunFacts
from tests.support.chat_folder import make_chat_folder
from tests.support.messages import assert_says
from tests.support.scripted_policy import SECRET, TEMPLATE, TOKEN, ScriptedPolicy

OPERATOR = "operator-token-of-a-test"
LIMITS = Limits(max_body_bytes=1 << 20, max_concurrent=8, request_seconds=10.0)
Ask: TypeAlias = Callable[..., httpx.Response]
URL = "http://127.0.0.1:9"


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    tokenizer = Tokenizer(make_chat_folder(tmp_path / "model", TEMPLATE, ["<|im_end|>"]))
    return Answers(ScriptedPolicy(tokenizer, lambda _: "yes"), tokenizer, "tiny", 4096, LIMITS)


@pytest.fixture
def ask(table: Table, connection: Connection, subjects: Subjects, tmp_path: Path, answers: Answers) -> Ask:
    """Send a request to a gateway of a run with the node of `relax up`, which has two rollouts."""
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects), 20))
    actors = {f"rollout.{n}": {"phase": "ready", "pid": 5 + n, "restarts": 0} for n in range(2)}
    node = {"name": "main", "where": "here", "since": time.time(), "pid": 1, "children": actors}
    connection.call(state.renew_lease("node", 0, node, 600), 10)
    facts = RunFacts(("rollout", "trainer"), {"trainer": "owns state"}, "sglang", tmp_path / "store", "gateway.0")
    control = Control(OperationLog(table), state.leases, facts)
    app = Gateway(answers, Access((TOKEN,), SECRET, (OPERATOR,)), LIMITS, control).app()

    def ask(method: str, path: str, body: Any = None, token: str = OPERATOR, **headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            given = {"Authorization": f"Bearer {token}"} if token else {}
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                return await client.request(method, path, json=body, headers=given | headers)

        return connection.call(send(), 30)

    return ask


def test_scaling_is_recorded_shown_and_cancelled(ask: Ask, table: Table) -> None:
    answer = ask("POST", "/v1/rollouts/scale", {"target": 3})
    assert answer.status_code == 202
    number = answer.json()["id"]
    assert answer.headers["location"] == f"/v1/operations/{number}"
    request = OperationLog(table).read().operations[number].request
    assert (request.role, request.target, request.author) == ("rollout", 3, "gateway.0")
    assert ask("GET", f"/v1/operations/{number}").json()["state"] == "PENDING"
    assert [o["id"] for o in ask("GET", "/v1/operations?state=pending").json()["operations"]] == [number]
    assert ask("POST", "/v1/rollouts/scale", {"delta": 1}).status_code == 409
    assert ask("POST", f"/v1/operations/{number}/cancel", {"reason": "enough"}).json()["reason"] == "enough"
    assert ask("GET", "/v1/operations?state=pending").json()["total"] == 0


def test_dry_run_records_nothing(ask: Ask, table: Table) -> None:
    answer = ask("POST", "/v1/rollouts/scale", {"delta": 2, "dry_run": True})
    assert answer.status_code == 200
    assert (answer.json()["before"], answer.json()["actors"]) == (2, ["rollout.2", "rollout.3"])
    assert not OperationLog(table).read().operations


def test_an_idempotency_key_gives_one_operation(ask: Ask) -> None:
    first = ask("POST", "/v1/rollouts/scale", {"target": 3}, **{"Idempotency-Key": "k"}).json()["id"]
    assert ask("POST", "/v1/rollouts/scale", {"target": 3, "idempotency_key": "k"}).json()["id"] == first
    other = ask("POST", "/v1/rollouts/scale", {"target": 4, "idempotency_key": "k"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
    assert "new key" in other.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/v1/rollouts/scale", {}, 400, "target"),
        ("POST", "/v1/rollouts/scale", {"target": 0}, 400, "target"),
        ("POST", "/v1/rollouts/scale", {"delta": -2}, 400, "1 to 999"),
        ("POST", "/v1/rollouts/scale", {"target": 2, "role": "trainer"}, 400, "owns state"),
        ("POST", "/v1/rollouts/scale", {"target": 2, "role": "cook"}, 400, "no role 'cook'"),
        ("POST", "/v1/rollouts/scale", {"target": 2, "node": "far"}, 400, "no node 'far'"),
        ("POST", "/v1/rollouts/scale", {"target": 2, "targets": 3}, 400, "targets"),
        ("GET", "/v1/operations?state=done", None, 400, "states are"),
        ("GET", "/v1/operations/7", None, 404, "no operation 7"),
        ("GET", "/v1/operations/x", None, 404, "no id"),
        ("POST", "/v1/operations/7/cancel", {}, 404, "no operation 7"),
        ("POST", "/v1/engines", {"url": "ftp://x"}, 400, "url"),
        ("POST", "/v1/engines", {"url": "http://user:secret@x"}, 400, "url"),
        ("POST", "/rollout/scale_out", {"engine_urls": ["http://a", "ftp://b"]}, 400, "engine_urls.1"),
        ("POST", "/rollout/scale_out", {"engine_urls": ["http://[1"]}, 400, "engine_urls.0"),
        ("DELETE", "/v1/engines/3", None, 404, "no engine 3"),
        ("POST", "/v1/roles", {"role": "a b", "settings": {}}, 400, "role"),
        ("POST", "/v1/roles", {"role": "judge"}, 400, "settings"),
        ("POST", "/v1/roles", {"role": "judge", "settings": {"text": "x" * 60000}, "more": 1}, 400, "more"),
        ("DELETE", "/v1/roles/a%20b", None, 400, "no name of a role"),
        ("POST", "/rollout/scale_out", {"num_replicas": 1}, 400, "scale_in"),
        ("POST", "/rollout/scale_in", {"num_replicas": 5}, 400, "scale_out"),
        ("POST", "/rollout/scale_out", {}, 400, "num_replicas"),
        ("POST", "/rollout/scale_in", {"engine_urls": [URL]}, 404, "no engine"),
        ("GET", "/rollout/scale_out/1,x", None, 404, "no such request"),
    ],
)
def test_a_bad_request_is_refused_and_starts_nothing(
    ask: Ask, table: Table, method: str, path: str, body: Any, status: int, said: str
) -> None:
    answer = ask(method, path, body)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
    assert not OperationLog(table).read().operations


@pytest.mark.parametrize("path", ["/v1/rollouts", "/v1/operations", "/rollout/engines"])
def test_clients_of_the_policy_are_no_operators(ask: Ask, path: str) -> None:
    assert ask("GET", path, token="").status_code == 401
    refused = ask("GET", path, token=TOKEN)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_an_operator")
    assert ask("GET", path).status_code == 200
    assert ask("POST", "/v1/rollouts/scale", {"target": 3}, token=TOKEN).status_code == 403
    assert ask("GET", "/v1/models", token=OPERATOR).status_code == 401


def test_the_key_of_an_engine_is_in_no_cell_and_no_answer(ask: Ask, table: Table, tmp_path: Path) -> None:
    answer = ask("POST", "/v1/engines", {"url": URL, "key": "very-secret-key"})
    assert answer.status_code == 202
    operation = OperationLog(table).read().operations[answer.json()["id"]]
    path = tmp_path / "store" / "engine-keys" / operation.request.key_file
    assert path.read_text() == "very-secret-key"
    assert path.stat().st_mode & 0o777 == 0o600
    cells = b"".join(cell.data for _, cell in table.snapshot([table.subjects.numbered("operation", "*")]))
    assert b"very-secret-key" not in cells
    assert "very-secret-key" not in ask("GET", f"/v1/operations/{operation.id}").text


def test_an_engine_of_the_run_is_listed_and_leaves_once(ask: Ask, table: Table) -> None:
    log = OperationLog(table)
    number = ask("POST", "/v1/engines", {"url": URL}).json()["id"]
    log.advance(number, State.CONNECTING)
    log.advance(number, State.HEALTH_CHECKING, plan=OperationPlan(0, "main", 0, 1, ["rollout.9999000"]))
    (engine,) = ask("GET", "/v1/rollouts").json()["engines"]
    assert (engine["id"], engine["url"], engine["is_active"]) == (number, URL, False)
    assert ask("POST", "/v1/engines", {"url": URL}).status_code == 409
    removal = ask("DELETE", f"/v1/engines/{number}")
    assert (removal.status_code, removal.json()["request"]["engine"]) == (202, number)
    assert ask("DELETE", f"/v1/engines/{number}").status_code == 409


def test_relax_paths_have_the_same_meaning(ask: Ask, table: Table) -> None:
    assert ask("POST", "/rollout/scale_out", {"num_replicas": 2}).json()["status"] == "NOOP"
    begun = ask("POST", "/rollout/scale_out", {"num_replicas": 4, "timeout_secs": 60}).json()
    assert begun["status"] == "PENDING"
    shown = ask("GET", f"/rollout/scale_out/{begun['request_id']}").json()
    assert (shown["num_replicas"], shown["cleanup_required"]) == (4, None)
    assert ask("POST", "/rollout/scale_out", {"num_replicas": 5}).status_code == 409
    cancelled = ask("POST", "/rollout/scale_out_cancel", {}).json()
    assert (cancelled["succeeded"], cancelled["skipped"]) == ([begun["request_id"]], [])
    assert ask("GET", "/rollout/scale_out?status=CANCELLED").json()["total_count"] == 1
    assert ask("POST", "/rollout/scale_in", {"num_replicas": 1, "dry_run": True}).json()["selected_engines"] == [
        "rollout.1"
    ]
    number = int(ask("POST", "/rollout/scale_in", {"num_replicas": 1}).json()["request_id"])
    for state in (State.DRAINING, State.REMOVING, State.REMOVED):
        OperationLog(table).advance(number, state, plan=OperationPlan(0, "main", 2, 1, ["rollout.1"]))
    shown = ask("GET", f"/rollout/scale_in/{number}").json()
    assert (shown["status"], shown["removed_engines"], shown["cleanup_required"]) == ("COMPLETED", ["rollout.1"], False)
    engines = ask("GET", "/rollout/engines").json()
    assert engines["total_engines"] == 2
    assert engines["models"]["default"]["engines"][0]["is_healthy"]


def test_two_urls_are_one_request_in_relax_form(ask: Ask) -> None:
    begun = ask("POST", "/rollout/scale_out", {"engine_urls": [URL, "http://127.0.0.1:8"]}).json()
    assert len(begun["request_id"].split(",")) == 2
    assert len(ask("GET", f"/rollout/scale_out/{begun['request_id']}").json()["engine_urls"]) == 2


def test_one_server_has_one_address(ask: Ask, table: Table) -> None:
    begun = ask("POST", "/v1/engines", {"url": "HTTP://LocalHost:9/"}).json()
    assert begun["request"]["url"] == "http://localhost:9"
    again = ask("POST", "/v1/engines", {"url": "http://localhost:9"})
    assert again.status_code == 409
    OperationLog(table).cancel(begun["id"], "test")
    OperationLog(table).request(OperationRequest("add_engine", url="http://Localhost:9//"))
    assert ask("POST", "/v1/engines", {"url": "http://LOCALHOST:9"}).status_code == 409


def test_several_servers_are_all_checked_before_the_first_request(ask: Ask, table: Table) -> None:
    assert ask("POST", "/v1/engines", {"url": URL}).status_code == 202
    assert ask("POST", "/rollout/scale_out", {"engine_urls": ["http://127.0.0.1:8", URL]}).status_code == 409
    assert [o.request.url for o in OperationLog(table).read().operations.values()] == [URL]


def test_key_of_a_refused_request_is_not_kept(ask: Ask, tmp_path: Path) -> None:
    bodies = [{"url": URL, "key": f"key-{n}"} for n in range(2)]
    assert [ask("POST", "/v1/engines", body).status_code for body in bodies] == [202, 409]
    assert [path.read_text() for path in (tmp_path / "store" / "engine-keys").iterdir()] == ["key-0"]


def test_operators_get_an_answer_while_clients_fill_the_gateway(ask: Ask, answers: Answers) -> None:
    with ExitStack() as stack:
        for _ in range(LIMITS.max_concurrent):
            stack.enter_context(answers.admitted())
        assert ask("GET", "/v1/models", token=TOKEN).status_code == 429
        assert ask("GET", "/v1/rollouts").status_code == 200


def test_every_route_is_described_for_programs_and_people_without_a_token(ask: Ask) -> None:
    document = ask("GET", "/openapi.json", token="").json()
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]["/v1/engines/{number}"]) == {"delete"}
    body = document["paths"]["/v1/rollouts/scale"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert {"target", "delta", "dry_run", "idempotency_key"} <= set(schema["properties"])
    assert all(entry["summary"] for methods in document["paths"].values() for entry in methods.values())
    page = ask("GET", "/docs", token="").text
    assert "/rollout/scale_out" in page
    assert "<script" not in page


def test_changes_of_roles_are_recorded_and_conflict_with_scaling(ask: Ask, table: Table) -> None:
    begun = ask("POST", "/v1/roles", {"role": "judge", "settings": {"actor": "x.Judge"}})
    request = OperationLog(table).read().operations[begun.json()["id"]].request
    assert (begun.status_code, request.kind, request.settings) == (202, "add_role", '{"actor": "x.Judge"}')
    assert ask("DELETE", "/v1/roles/judge").status_code == 409
    assert ask("POST", "/v1/roles/rollout/replace", {"timeout_secs": 5}).json()["request"]["kind"] == "replace_role"
    assert ask("POST", "/v1/rollouts/scale", {"target": 3}).status_code == 409
    said = ask("POST", "/v1/rollouts/scale", {"target": 2, "delta": 1}).json()["error"]["message"]
    assert_says(said, "`target`", "`delta`")
    assert ask("POST", "/v1/roles/trainer/move", {}).status_code == 400
    moved = ask("POST", "/v1/roles/trainer/move", {"node": "far"}).json()["request"]
    assert (moved["kind"], moved["role"], moved["node"]) == ("move_role", "trainer", "far")
    (rollouts,) = ask("GET", "/v1/roles").json()["roles"]
    assert [actor["actor"] for actor in rollouts["actors"]] == ["rollout.0", "rollout.1"]
