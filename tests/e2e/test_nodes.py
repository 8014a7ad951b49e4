"""A run whose roles are on several nodes, each with its own credentials."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from broker.connection import Connection
from broker.leases import RunState
from broker.listeners import Settings
from broker.streams import ensure_bucket
from broker.subjects import Subjects
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.nodes import Node
from tests.support.running import Run, processes_of, relax, wait_until

NAME = "spread"
HERE = "prompts,reward,advantages,trainer"


@pytest.fixture
def spread(make_guarded: MakeGuarded, make_run: Callable[..., Run]) -> tuple[Guarded, Run]:
    """A guarded broker, and a run that uses it and is not up yet."""
    guarded = make_guarded([f"run.name={NAME}"])
    guarded.make()
    guarded.start()
    broker = [f"broker.url=nats://127.0.0.1:{guarded.port}", f"broker.credentials={guarded.keys}"]
    return guarded, make_run(NAME, *broker)


def children(state: RunState, connection: Connection) -> dict[str, list[str]]:
    """The ready actors of each node."""
    leases = connection.call(state.leases(), 10)
    return {
        key: sorted(name for name, child in (lease.get("children") or {}).items() if child["phase"] == "ready")
        for key, lease in leases.items()
        if key.startswith("node.")
    }


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_nodes_join_are_scaled_and_leave_until_the_run_ends(
    spread: tuple[Guarded, Run], nodes: Callable[..., Node], tmp_path: Path
) -> None:
    guarded, run = spread
    run.start("run.steps=100000", "--roles", HERE)
    wait_until(run.folder.address.exists, "broker.json")
    first = nodes(guarded, run, "first", "rollout=2")
    with closing(Connection(guarded.address("operator"), "test")) as connection:
        bucket = connection.call(ensure_bucket(connection, Subjects(NAME)), 20)
        state = RunState(connection, bucket)
        wait_until(
            lambda: children(state, connection).get("node.1") == ["rollout.1000", "rollout.1001"], "first node", 120
        )
        shown = relax("tree", str(run.folder.root), cwd=tmp_path).stdout
        assert "node 1 first" in shown
        assert "rollout.1001 ready" in shown
        assert "trainer.0" in shown
        folder = str(run.folder.root)
        assert relax("scale", folder, "rollout=1", cwd=tmp_path).stdout == "rollout: 1 actors\n"
        assert children(state, connection)["node.1"] == ["rollout.1000"]
        second = nodes(guarded, run, "second", "rollout")
        wait_until(lambda: children(state, connection).get("node.2") == ["rollout.2000"], "second node", 120)
        refused = relax("scale", folder, "rollout=2", cwd=tmp_path)
        assert refused.returncode == 2
        assert "on no node, or on several" in refused.stderr
        assert relax("scale", folder, "rollout=2", "--node", "second", cwd=tmp_path).returncode == 0
        assert children(state, connection)["node.2"] == ["rollout.2000", "rollout.2001"]
        assert children(state, connection)["node.1"] == ["rollout.1000"]
        code, said = first.end(signal.SIGTERM)
        assert code == 0, said
        assert "node.1" not in connection.call(state.leases(), 10)
    run.end_in_order()
    code, said = second.end(signal.SIGTERM)
    assert code == 0, said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_killed_node_loses_no_row(
    spread: tuple[Guarded, Run], nodes: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    guarded, run = spread
    run.start("run.steps=100", "reward.function=tiny_tasks.gated_share_of_sevens", "--roles", HERE)
    wait_until(run.folder.address.exists, "broker.json")
    victim, other = (nodes(guarded, run, name, "rollout") for name in ("victim", "other"))
    with closing(Connection(guarded.address("operator"), "test")) as connection:
        state = RunState(connection, connection.call(ensure_bucket(connection, Subjects(NAME)), 20))
        wait_until(lambda: len([n for n in children(state, connection).values() if n]) == 3, "three nodes", 120)
    gate.touch()
    victim.end(signal.SIGKILL)
    code, result, said = run.finish(150)
    assert code == 0, said
    assert result["trained"] == 400
    assert result["quarantined"] == 0
    assert other.end()[0] == 0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_node_that_loses_its_lease_takes_another_number(
    spread: tuple[Guarded, Run], nodes: Callable[..., Node]
) -> None:
    guarded, run = spread
    run.start("run.steps=100000", "supervision.heartbeat=2", "--roles", HERE)
    wait_until(run.folder.address.exists, "broker.json")
    away = nodes(guarded, run, "away", "rollout")
    with closing(Connection(guarded.address("operator"), "test")) as connection:
        state = RunState(connection, connection.call(ensure_bucket(connection, Subjects(NAME)), 20))

        def names() -> dict[str, str]:
            leases = connection.call(state.leases(), 10)
            return {key: str(lease.get("name")) for key, lease in leases.items() if key.startswith("node.")}

        wait_until(lambda: children(state, connection).get("node.1") == ["rollout.1000"], "its actor", 120)
        stopped = processes_of(away.work)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: "node.1" not in names(), "expiry of the lease")
            nodes(guarded, run, "other", "rollout")
            wait_until(lambda: children(state, connection).get("node.1") == ["rollout.1000"], "the other's actor", 120)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        wait_until(lambda: children(state, connection).get("node.2") == ["rollout.2000"], "another number", 120)
        assert {key: name for key, name in names().items() if key != "node.0"} == {"node.1": "other", "node.2": "away"}
    run.end_in_order()


@pytest.mark.slow
def test_role_that_owns_state_does_not_run_twice(spread: tuple[Guarded, Run], nodes: Callable[..., Node]) -> None:
    guarded, run = spread
    run.start("run.steps=100000", "--roles", HERE)
    with closing(Connection(guarded.address("operator"), "test")) as connection:
        wait_until(run.folder.address.exists, "broker.json")
        state = RunState(connection, connection.call(ensure_bucket(connection, Subjects(NAME)), 20))
        wait_until(lambda: "owner.trainer" in connection.call(state.leases(), 10), "owner of the trainer", 120)
    code, said = nodes(guarded, run, "second", "trainer").end(deadline=90)
    assert code == 1, said
    assert "trainer runs on node 0" in said
    code, said = nodes(guarded, run, "third", "nobody").end(deadline=60)
    assert code == 2, said
    assert "no role 'nobody' in run spread" in said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_node_whose_credentials_expire_continues_with_renewed_ones(
    spread: tuple[Guarded, Run], nodes: Callable[..., Node], tmp_path: Path
) -> None:
    guarded, run = spread
    run.start("run.steps=100000", "--roles", HERE)
    wait_until(run.folder.address.exists, "broker.json")
    seconds = 30.0
    brief = Guarded(tmp_path / "brief", guarded.port, guarded.settings)
    shutil.copytree(guarded.keys, brief.keys)
    brief.make(Settings(days=seconds / 86400))
    expires = time.monotonic() + seconds
    node = nodes(brief, run, "brief", "rollout")
    with closing(Connection(guarded.address("operator"), "test")) as connection:
        state = RunState(connection, connection.call(ensure_bucket(connection, Subjects(NAME)), 20))
        wait_until(lambda: children(state, connection).get("node.1") == ["rollout.1000"], "the node", seconds)
        brief.make()
        pid = connection.call(state.leases(), 10)["node.1"]["pid"]

        def restarted() -> bool:
            lease = connection.call(state.leases(), 10).get("node.1", {})
            return lease.get("pid") != pid and children(state, connection).get("node.1") == ["rollout.1000"]

        wait_until(restarted, "restart of the node", 90)
        assert time.monotonic() > expires - 1.0
        assert relax("scale", str(run.folder.root), "rollout=2", "--node", "brief", cwd=tmp_path).returncode == 0
    run.end_in_order()
    code, said = node.end(signal.SIGTERM)
    assert code == 0, said
