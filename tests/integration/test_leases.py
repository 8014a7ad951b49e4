"""What counts as a lease in the bucket of a run, and what is ignored and reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.connection import Connection
from broker.lease_entries import lease_of, signed
from broker.leases import RunState
from broker.streams import ensure_bucket
from broker.subjects import Subjects
from broker.table import Table
from tests.support.running import wait_until

ACTOR = {"pid": 7, "incarnation": 2, "since": 1.5, "rows": ["group.0.1"], "waits_for": None, "doing_since": 2.5}
NODE = {"name": "a", "where": "host:/work"}
OWNER = {"node": 1, **NODE}
TTL = {"Nats-TTL": "10"}


@pytest.fixture
def state(connection: Connection, subjects: Subjects) -> RunState:
    return RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))


@pytest.mark.parametrize(
    ("key", "state"),
    [
        ("lease.rollout.1003", ACTOR),
        ("lease.trainer.0", {**ACTOR, "weights": -1, "handled": 3, "has_worked": True, "code": "0a"}),
        ("lease.node.0", NODE),
        ("lease.node.4", {**NODE, "pid": 3, "since": 1.0, "children": {"rollout.0": {}}, "zygote": None, "gpus": {},
                          "machine": {"load": 1.5, "gpus": [{"number": 0, "busy": 0.5}]}}),
        ("lease.root.0", {"pid": 3, "since": 1.0, "children": {}}),
        ("lease.owner.trainer", OWNER),
    ],
)  # fmt: skip
def test_a_lease_is_read_as_it_was_written(key: str, state: dict[str, Any]) -> None:
    assert lease_of(key, signed(key, state), TTL) == state


UNLIMITED = "its time to live is unlimited, not at most 3600 s"
CHECKSUM = "its checksum does not match its key and content"
FIELDS = "it has not the fields of a lease"


@pytest.mark.parametrize(
    ("key", "data", "headers", "why"),
    [
        ("lease.rollout.0", signed("lease.rollout.0", ACTOR), None, UNLIMITED),
        ("lease.rollout.0", signed("lease.rollout.0", ACTOR), {"Nats-TTL": "never"},
         "its time to live is never, not at most 3600 s"),
        ("lease.rollout.0", signed("lease.rollout.0", ACTOR), {"Nats-TTL": "99999999"},
         "its time to live is 99999999, not at most 3600 s"),
        ("lease.rollout.0", signed("lease.rollout.1", ACTOR), TTL, CHECKSUM),
        ("lease.rollout.0", json.dumps(ACTOR).encode(), TTL, CHECKSUM),
        ("lease.rollout.0", b"[" * 9999, TTL, "it is not a JSON object"),
        ("lease.rollout.0", b"\xff", TTL, "it is not a JSON object"),
        ("lease.rollout.0", signed("lease.rollout.0", NODE), TTL, FIELDS),
        ("lease.rollout.0", signed("lease.rollout.0", {**ACTOR, "more": 1}), TTL, FIELDS),
        ("lease.rollout.0", signed("lease.rollout.0", {**ACTOR, "rows": [1]}), TTL, FIELDS),
        ("lease.node.0", signed("lease.node.0", {**NODE, "children": []}), TTL, FIELDS),
        ("lease.owner.trainer", signed("lease.owner.trainer", {**OWNER, "node": True}), TTL, FIELDS),
        ("lease.node.01", signed("lease.node.01", NODE), TTL, "its key names no lease"),
        ("lease.rollout.0.1", signed("lease.rollout.0.1", ACTOR), TTL, "its key names no lease"),
    ],
)  # fmt: skip
def test_everything_else_is_no_lease(key: str, data: bytes, headers: dict[str, str] | None, why: str) -> None:
    assert lease_of(key, data, headers) == why


def test_an_answer_of_the_server_is_no_lease(table: Table, state: RunState) -> None:
    """The server publishes its answer wherever a request says, and an answer about a consumer has a name, too."""
    connection, key = table.connection, "lease.owner.trainer"
    stream = table.subjects.table_stream

    async def ask() -> None:
        request = {"stream_name": stream, "config": {"durable_name": "attacker", "ack_policy": "none"}}
        endpoint = f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.attacker"
        answer = f"$KV.{table.subjects.state_bucket}.{key}"
        await connection.nc.publish(endpoint, json.dumps(request).encode(), reply=answer)

    connection.call(ask(), 20)
    forged = wait_until(lambda: connection.call(state.forged_leases(), 10), "answer in the bucket")
    assert forged == {"owner.trainer": UNLIMITED}
    assert connection.call(state.leases(), 10) == {}
    assert connection.call(state.acquire_lease("owner", "trainer", OWNER, 5), 10)
    assert connection.call(state.leases(), 10) == {"owner.trainer": OWNER}
    assert connection.call(state.forged_leases(), 10) == {}
    assert not connection.call(state.acquire_lease("owner", "trainer", OWNER, 5), 10)


def test_a_released_lease_is_neither_held_nor_forged(state: RunState, connection: Connection) -> None:
    connection.call(state.renew_lease("node", 1, NODE, 5), 10)
    assert connection.call(state.lease("node", 1), 10) == NODE
    connection.call(state.release_lease("node", 1), 10)
    assert connection.call(state.lease("node", 1), 10) is None
    assert connection.call(state.forged_leases(), 10) == {}
    assert connection.call(state.acquire_lease("node", 1, NODE, 5), 10)
