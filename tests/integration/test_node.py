"""Node: reports, scaling, leases on its number and roles, and joining a run."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.address import Address, address_of
from broker.connection import Connection
from broker.leases import RunState
from broker.streams import ensure_bucket
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.config import load_config, validate
from relax_actors.errors import ConfigError
from relax_actors.monitoring.diagnosis.log_reader import observe
from relax_actors.runtime.blackbox import Snapshot
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision import ownership as owners
from relax_actors.supervision import remote_node as remote
from relax_actors.supervision.assignment import Assignment, where, whole
from relax_actors.supervision.config_watcher import ConfigWatcher
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.ownership import NodeLeases
from relax_actors.supervision.pools import pools_of
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.remote_node import NodeRequest, RemoteNode
from relax_actors.supervision.reporter import Reporter
from relax_actors.supervision.spec import Blame, Exit, Failure
from relax_actors.supervision.streams import fetch_run_record, publish_run, publish_scale, store_mark
from relax_actors.supervision.supervisor import GiveUp
from tests.support.messages import assert_says
from tests.support.process_trees import HEAD, WAITS, Recorder, TreeThread, python
from tests.support.running import TINY, relax, wait_until

MakeTable = Callable[[Connection], object]


def test_report_that_cannot_be_written_reaches_the_root_by_the_status_pipe(
    connection: Connection, subjects: Subjects, tmp_path: Path, make_table: MakeTable
) -> None:
    make_table(connection)
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    reporter = Reporter(RunFolder(tmp_path / "nowhere"), connection, state, Journal(connection, subjects, "node", 0))
    reporter.ended("rollout.3", Exit(normal=False, reason="exit code 70", detail="Traceback"), Snapshot(0.0))
    reporter.gave_up("rollout", GiveUp("rollout.3", "6 failures"))
    assert reporter.failure == Failure("rollout.3", "6 failures", "Traceback")


def test_end_of_an_actor_is_published_with_its_blame(
    connection: Connection, subjects: Subjects, tmp_path: Path, make_table: Callable[[Connection], Table]
) -> None:
    table = make_table(connection)
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    journal = Journal(connection, subjects, "node", 0)
    reporter = Reporter(RunFolder(tmp_path), connection, state, journal)
    for blame in (Blame.ROWS, Blame.EXTERNAL):
        reporter.ended("rollout.3", Exit(normal=False, reason="killed by SIGKILL", blame=blame), Snapshot(0.0))
    assert journal.flush(10)
    crashes = [event for event in observe(table, {}).events if event.kind == "crashed"]
    assert [(event.sender, event.external) for event in crashes] == [("rollout.3", False), ("rollout.3", True)]


def test_scaling_during_the_start_of_a_node_is_applied(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    config = load_config(TINY, [])
    folder.root.mkdir()
    folder.save_config(config, str(TINY.parent))
    seen = folder.config_fingerprint()
    body = folder.load_config().model_dump(mode="json")
    body["reward"]["replicas"] = 2
    folder.replace_config(validate(body, "test"))
    pools = {"reward": pools_of(config, whole(config), random.Random(1))["reward"]}
    recorder = Recorder()
    tree = ProcessTree(pools, lambda child: Launch(python(WAITS), tmp_path / child), recorder, 60.0)
    watched = ConfigWatcher(folder, seen, tree, config, whole(config))
    running = TreeThread(tree, recorder)
    try:
        running.until("ready", "reward.0")
        watched()
        running.until("ready", "reward.1")
    finally:
        assert running.stop() is None


@pytest.mark.parametrize("leaves", [True, False])
def test_inference_server_stops_after_its_actor(tmp_path: Path, *, leaves: bool) -> None:
    folder, finished = RunFolder(tmp_path / "run"), tmp_path / "finished"
    config = load_config(TINY, ["rollout.backend=sglang", "rollout.replicas=2"])
    folder.root.mkdir()
    folder.save_config(config, str(TINY.parent))
    pools = pools_of(config, whole(config), random.Random(1))
    pools = {name: pools[name] for name in ("server", "rollout")}
    drains = (
        f"{HEAD}def end(*_):\n    while not os.path.exists({str(finished)!r}): signal.sigtimedwait([], 0.01)\n"
        "    sys.exit(0)\nsignal.signal(15, end)\nsay(ready=True)\nwhile True: signal.pause()\n"
    )
    recorder = Recorder()
    tree = ProcessTree(
        pools,
        lambda child: Launch(python(drains if child.startswith("rollout") else WAITS), tmp_path / child),
        recorder,
        60.0,
    )
    watched = ConfigWatcher(folder, folder.config_fingerprint(), tree, config, whole(config))
    running = TreeThread(tree, recorder)
    try:
        wait_until(lambda: [state["phase"] for state in tree.states().values()] == ["ready"] * 4, "start")
        if leaves:
            watched.leave()
        else:
            body = folder.load_config().model_dump(mode="json")
            body["rollout"]["replicas"] = 1
            folder.replace_config(validate(body, "test"))
            watched()
        wait_until(lambda: pools["rollout"].children["rollout.1"].leaving, "start of the end")
        assert not pools["server"].children["server.1"].leaving
        finished.touch()
        left = [] if leaves else ["0"]
        for pool in ("rollout", "server"):
            wanted = [f"{pool}.{n}" for n in left]
            wait_until(lambda pool=pool, wanted=wanted: list(pools[pool].children) == wanted, f"end of {pool}")
            watched()
    finally:
        finished.touch()
        running.stop()


@pytest.mark.parametrize("seconds", [0.2, 10.0])
def test_surplus_actor_may_use_the_deadline_of_its_role_to_finish(seconds: float) -> None:
    config = load_config(TINY, [f"reward.deadline={seconds}"])
    (child,) = pools_of(config, whole(config), random.Random(1))["reward"].children.values()
    assert child.spec.drain == seconds + config.supervision.shutdown


@pytest.mark.slow
def test_node_that_lost_a_role_does_not_take_it_back(connection: Connection, subjects: Subjects) -> None:
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    away, other = (
        NodeLeases(connection, state, Assignment(n, name, {"trainer": None}), 2.0)
        for n, name in ((0, "away"), (1, "other"))
    )
    lost = threading.Event()
    away.on_lost = lost.set
    away.claim()
    away.claim()  # the next incarnation of the same node
    with pytest.raises(ConfigError, match="trainer runs on node 0"):
        renewing = threading.Event()
        thread = threading.Thread(target=lambda: keep(away, renewing))
        thread.start()
        try:
            other.claim()
        finally:
            renewing.set()
            thread.join()
    other.claim()
    away.renew_roles()
    assert lost.wait(10)
    assert connection.call(state.leases(), 10)["owner.trainer"] == {"node": 1, "name": "other", "where": ""}


def test_malformed_claim_occupies_no_role_and_no_number(connection: Connection, subjects: Subjects) -> None:
    """Any client that may make requests can have a JSON answer written under any key."""
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    junk = {"type": "io.nats.jetstream.api.v1.stream_info_response", "total": 0}
    owned = NodeLeases(connection, state, Assignment(1, "first", {"trainer": None}), 2.0)
    lost = threading.Event()
    owned.on_lost = lost.set
    for key in ("lease.owner.trainer", "lease.node.1"):
        connection.call(state.put(key, junk), 10)
    owned.claim()
    assert connection.call(state.leases(), 10)["owner.trainer"] == {"node": 1, "name": "first", "where": ""}
    for key in ("lease.owner.trainer", "lease.node.1"):
        connection.call(state.put(key, junk), 10)
    wait_until(lambda: owned.renew({"name": "first"}) or "node.1" in connection.call(state.leases(), 10), "its number")
    entry = {"node": 1, "name": "first", "where": ""}
    wait_until(lambda: connection.call(state.leases(), 10).get("owner.trainer") == entry, "its role")
    assert not lost.is_set()


def test_node_that_lost_its_number_does_not_renew_the_lease(connection: Connection, subjects: Subjects) -> None:
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    away, other = (
        NodeLeases(connection, state, Assignment(1, name, {"rollout": 1}), 30.0) for name in ("away", "other")
    )

    def holder_after_renewal(owned: NodeLeases, name: str) -> str:
        owned.renew({"name": name})
        renewal = owned.node_renewal
        assert renewal is not None
        renewal.result(10)
        return str(connection.call(state.leases(), 10)["node.1"]["name"])

    assert holder_after_renewal(away, "away") == "away"
    connection.call(state.release_lease("node", 1), 10)
    assert holder_after_renewal(other, "other") == "other"
    assert holder_after_renewal(away, "away") == "other"
    away.drop()
    assert connection.call(state.leases(), 10)["node.1"] == {"name": "other", "where": ""}
    other.drop()
    assert "node.1" not in connection.call(state.leases(), 10)


@pytest.mark.slow
def test_only_one_of_two_live_nodes_with_the_same_name_joins(
    connection: Connection, subjects: Subjects, address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    config = load_config(TINY, ["supervision.heartbeat=1"])
    monkeypatch.setattr(remote, "CLAIM_SECONDS", 1.0)
    monkeypatch.setattr(remote, "OWNER_SECONDS", 4.0)
    monkeypatch.setattr(owners, "OWNER_SECONDS", 2.0)
    wanted = [
        NodeRequest(subjects.run, "twin", ["trainer"], tmp_path, tmp_path, tmp_path / name) for name in ("a", "b")
    ]
    first, second = (RemoteNode(address, one) for one in wanted)
    nodes = [Assignment(1, "twin", {"trainer": 1}, where(node.folder)) for node in (first, second)]
    owned, other = (NodeLeases(connection, state, node, 2.0) for node in nodes)
    over = threading.Event()
    thread = threading.Thread(target=lambda: keep(owned, over, lambda: owned.renew({})))
    try:
        assert first._claim(first._state(), config) == 1
        assert first._claim(first._state(), config) == 1  # the next incarnation of the same node
        owned.claim()
        thread.start()
        with pytest.raises(ConfigError, match=r"has a node named 'twin', number 1; .* --name"):
            second._claim(second._state(), config)
        with pytest.raises(ConfigError, match=r"trainer runs on node 1 \(twin\) already"):
            other.claim()
        over.set()
        thread.join()
        assert second._claim(second._state(), config) == 1
        other.claim()
    finally:
        over.set()
        for node in (first, second):
            node._connection.close()
            node._lock.close()


def test_another_folder_at_the_path_of_the_store_is_refused(
    connection: Connection, subjects: Subjects, address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "STORE_SECONDS", 0.0)
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    config = load_config(TINY, [f"run.name={subjects.run}", f"store.path={tmp_path / 'store'}"])
    connection.call(publish_run(state, config, ""), 10)
    connection.call(publish_scale(state, "far", {"rollout": 3}), 10)
    connection.call(publish_run(state, config, "", finished=True), 10)
    found = connection.call(fetch_run_record(state), 10)
    assert found is not None
    assert found.mark == store_mark(tmp_path / "store") != ""
    assert found.scaled == {"far": {"rollout": 3}}
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mark").write_text("another")
    for name, error in (("empty", "has no file 'mark'"), ("other", "is another run's"), ("store", "")):
        node = RemoteNode(
            address, NodeRequest(subjects.run, "far", [], tmp_path / name, tmp_path, tmp_path / f"work-{name}")
        )
        try:
            if error:
                with pytest.raises(ConfigError, match=rf"{name} is not the store of run .*: it {error}.*--store"):
                    node._check_store(found)
            else:
                node._check_store(found)
        finally:
            node._connection.close()
            node._lock.close()


def test_a_machine_with_other_code_is_refused_before_anything_starts(
    connection: Connection, subjects: Subjects, address: Address, tmp_path: Path
) -> None:
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    config = load_config(TINY, [f"run.name={subjects.run}", f"store.path={tmp_path / 'store'}"])
    connection.call(publish_run(state, config, ""), 10)
    connection.call(state.update("run", lambda body: {**body, "code": "0123456789abcdef"}), 10)
    assert address.credentials is not None
    where = ["--broker", address.url, "--credentials", str(Path(address.credentials).parent), "--run", subjects.run]
    here = ["--store", str(tmp_path / "store"), "--work", str(tmp_path / "work"), "--role", "reward"]
    done = relax("node", *where, *here, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "this machine has other code" in done.stderr
    assert_says(done.stderr, "0123456789abcdef", "same version")
    assert connection.call(state.leases("node"), 10) == {}


def test_passwords_are_removed_from_the_urls_of_a_cluster() -> None:
    address = address_of("nats://a%40b:p,w@one:4222,nats://a%40b:p,w@two:4222,nats://three:4222")
    assert address.url == "nats://one:4222,nats://two:4222,nats://three:4222"
    assert (address.user, address.password) == ("a@b", "p,w")
    assert address_of("nats://one:4222,nats://two:4222").user is None


def test_concurrent_changes_are_all_kept(connection: Connection, subjects: Subjects) -> None:
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))

    async def add() -> None:
        await asyncio.gather(
            *(state.update("run", lambda before: {"n": (before or {"n": 0})["n"] + 1}) for _ in range(8))
        )

    connection.call(add(), 30)
    assert connection.call(state.get("run"), 10) == {"n": 8}


def keep(owned: NodeLeases, over: threading.Event, renew: Callable[[], None] | None = None) -> None:
    while not over.wait(0.5):
        (renew or owned.renew_roles)()
