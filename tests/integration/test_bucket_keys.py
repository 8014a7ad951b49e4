"""Readers of the bucket of a run whose bucket has malformed keys, on a real server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.connection import Connection
from broker.leases import RunState
from broker.streams import ensure_bucket
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.messages import Weights
from relax_actors.runtime import Context
from relax_actors.training.collector import Collector, Sweep
from relax_actors.training.strays import allowed_bytes
from tests.support.contexts import context_of
from tests.support.faults import log_of
from tests.support.running import wait_until

ROLES = ("rollout", "trainer")
NAMES = ("failure", "lease", "incarnation", "run", "note", *ROLES, "node", "owner", "group")
TOKENS = (*NAMES, "0", "17", "é", "x" * 90, "=")
NODE = {"name": "a", "where": "host:/work"}
ROW = RowId(0, 0)


def malformed(seed: int, number: int) -> list[str]:
    """Draw keys that no process of a run has."""
    draw = random.Random(seed)
    kinds = ("failure", "lease", "incarnation", *TOKENS)
    keys = {".".join([draw.choice(kinds), *draw.choices(TOKENS, k=draw.randrange(6))]) for _ in range(number)}
    return sorted(key for key in keys if not allowed_bytes(key, ROLES))


def write(connection: Connection, subjects: Subjects, keys: list[str], data: bytes = b"1") -> None:
    async def work() -> None:
        await asyncio.gather(*(connection.js.publish(f"$KV.{subjects.state_bucket}.{key}", data) for key in keys))

    connection.call(work(), 60)


def keys_of(connection: Connection, subjects: Subjects) -> set[str]:
    stream = f"KV_{subjects.state_bucket}"
    info = connection.call(connection.js.stream_info(stream, subjects_filter=">"), 10)
    return {subject.removeprefix(f"$KV.{subjects.state_bucket}.") for subject in info.state.subjects or {}}


@pytest.fixture
def state(connection: Connection, subjects: Subjects) -> RunState:
    return RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))


@pytest.fixture
def context(table: Table, tmp_path: Path) -> Context:
    table.put(table.subjects.numbered("weights", 0), Weights(0, "f" * 32, [], 1))
    return context_of(table, tmp_path, "trainer", (), 1)


@pytest.mark.parametrize("seed", range(3))
def test_malformed_keys_are_ignored(connection: Connection, subjects: Subjects, state: RunState, seed: int) -> None:
    keys = ["failure.1", "failure.rollout", "lease.1", "lease.rollout.x", *malformed(seed, 150)]
    write(connection, subjects, keys)
    connection.call(state.renew_lease("node", 1, NODE, 60), 10)
    connection.call(state.count_failure("rollout", ROW, "", ""), 10)
    assert connection.call(state.leases(), 60) == {"node.1": NODE}
    assert connection.call(state.leases("rollout"), 60) == {}
    forged = {key.removeprefix("lease.") for key in keys if key.startswith("lease.")}
    assert set(connection.call(state.forged_leases(), 60)) == forged
    gone: list[RowId] = []
    connection.call(state.forget_failures(lambda row: not gone.append(row)), 60)
    assert gone == [ROW]


def test_malformed_keys_are_removed_by_a_sweep(connection: Connection, subjects: Subjects, context: Context) -> None:
    connection.call(context.state.put("run", {}), 10)
    write(connection, subjects, ["failure.1", *malformed(7, 150)])
    Collector(context, ROLES, {}).sweep()
    assert keys_of(connection, subjects) == {"run"}


def test_keys_of_one_part_are_measured_in_a_large_bucket(
    connection: Connection, subjects: Subjects, context: Context
) -> None:
    """Such as `run`, when thousands of failures with their tracebacks have filled the bucket."""
    connection.call(context.state.put("run", {"config": {}}), 10)
    rows = [RowId(0, index) for index in range(500)]
    for row in rows:
        connection.call(context.state.count_failure("rollout", row, "x" * 2000, "y" * 8000), 10)
    connection.call(context.state.enforce(lambda key: allowed_bytes(key, ROLES)), 60)
    left = keys_of(connection, subjects)
    assert "run" in left
    assert len(left) == len(rows) + 1


class Broken(tuple[str, ...]):  # noqa: SLOT001 it has an attribute
    """Roles that cannot be listed until they are mended, as by a fault of the program."""

    fails = True

    def __iter__(self) -> Iterator[str]:
        if self.fails:
            msg = "no such luck"
            raise IndexError(msg)
        return super().__iter__()


def test_a_sweep_that_fails_is_reported_and_repeated(
    connection: Connection, subjects: Subjects, context: Context
) -> None:
    write(connection, subjects, ["failure.1"])
    roles = Broken(ROLES)
    collector = Collector.start(context, roles, {})
    collector.ask(Sweep())
    try:
        key = wait_until(lambda: log_of(context.table, "event.trainer.0.sweep_failed"), "event")[-1]
        assert key["error"] == "IndexError: no such luck"
        assert "_remove_keys" in key["traceback"]
        roles.fails = False
        wait_until(lambda: keys_of(connection, subjects) == set(), "a later look at the keys")
    finally:
        collector.stop()
