"""What the node's supervisor tells and heeds."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.address import Address
from broker.connection import Connection
from broker.leases import RunState
from broker.streams import ensure_bucket
from broker.subjects import Subjects
from relax_actors.config import load_config, validate
from relax_actors.errors import ConfigError
from relax_actors.runtime.blackbox import Reading
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision import ownership as owners
from relax_actors.supervision import remote_node as remote
from relax_actors.supervision.assignment import Assignment, where, whole
from relax_actors.supervision.launch import Launch
from relax_actors.supervision.node import Watched, pools_of
from relax_actors.supervision.ownership import Owned
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.remote_node import Remote, Wanted
from relax_actors.supervision.reporter import Reporter
from relax_actors.supervision.root import address_of
from relax_actors.supervision.spec import Exit, Failure
from relax_actors.supervision.streams import mark_of, publish_run, publish_scale, published_run
from relax_actors.supervision.supervisor import GiveUp
from tests.support.running import TINY, wait_until
from tests.unit.test_processes import HEAD, WAITS, Recorder, Running, python

MakeTable = Callable[[Connection], object]


def test_a_report_that_cannot_be_written_is_kept_for_the_root(
    connection: Connection, subjects: Subjects, tmp_path: Path, make_table: MakeTable
) -> None:
    make_table(connection)
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    reporter = Reporter(RunFolder(tmp_path / "nowhere"), connection, state, Journal(connection, subjects, "node", 0))
    reporter.ended("rollout.3", Exit(normal=False, reason="exit code 70", detail="Traceback"), Reading(0.0))
    reporter.gave_up("rollout", GiveUp("rollout.3", "6 failures"))
    assert reporter.failure == Failure("rollout.3", "6 failures", "Traceback")


def test_a_scaling_while_the_node_starts_is_not_missed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    config = load_config(TINY, [])
    folder.root.mkdir()
    folder.save_config(config, str(TINY.parent))
    seen = folder.state_of_config()
    body = folder.load_config().model_dump(mode="json")
    body["reward"]["replicas"] = 2
    folder.change_config(validate(body, "test"))
    pools = {"reward": pools_of(config, whole(config), random.Random(1))["reward"]}
    recorder = Recorder()
    tree = ProcessTree(pools, lambda child: Launch(python(WAITS), tmp_path / child), recorder, 60.0)
    watched = Watched(folder, seen, tree)
    running = Running(tree, recorder)
    try:
        running.until("ready", "reward.0")
        watched()
        running.until("ready", "reward.1")
    finally:
        assert running.stop() is None


@pytest.mark.parametrize("leaves", [True, False])
def test_a_server_goes_when_its_actor_has_finished(tmp_path: Path, *, leaves: bool) -> None:
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
    watched = Watched(folder, folder.state_of_config(), tree)
    running = Running(tree, recorder)
    try:
        wait_until(lambda: [state["phase"] for state in tree.states().values()] == ["ready"] * 4, "start")
        if leaves:
            watched.leave()
        else:
            body = folder.load_config().model_dump(mode="json")
            body["rollout"]["replicas"] = 1
            folder.change_config(validate(body, "test"))
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
def test_an_actor_too_many_has_its_roles_deadline_to_finish(seconds: float) -> None:
    config = load_config(TINY, [f"reward.deadline={seconds}"])
    (child,) = pools_of(config, whole(config), random.Random(1))["reward"].children.values()
    assert child.spec.drain == seconds + config.supervision.shutdown


def test_a_node_that_was_away_does_not_take_a_role_back(connection: Connection, subjects: Subjects) -> None:
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    away, other = (
        Owned(connection, state, Assignment(n, name, {"trainer": None}), 2.0) for n, name in ((0, "away"), (1, "other"))
    )
    told = threading.Event()
    away.lost = told.set
    away.claim()
    away.claim()  # another life of the same node
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
    away.renew()
    assert told.wait(10)
    assert connection.call(state.leases(), 10)["owner.trainer"] == {"node": 1, "name": "other", "where": ""}


def test_what_is_no_nodes_claim_takes_no_role_and_no_number(connection: Connection, subjects: Subjects) -> None:
    """Whoever may make a request can have its answer, which is JSON, written under any key."""
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    junk = {"type": "io.nats.jetstream.api.v1.stream_info_response", "total": 0}
    owned = Owned(connection, state, Assignment(1, "first", {"trainer": None}), 2.0)
    told = threading.Event()
    owned.lost = told.set
    for key in ("lease.owner.trainer", "lease.node.1"):
        connection.call(state.put(key, junk), 10)
    owned.claim()
    assert connection.call(state.leases(), 10)["owner.trainer"] == {"node": 1, "name": "first", "where": ""}
    for key in ("lease.owner.trainer", "lease.node.1"):
        connection.call(state.put(key, junk), 10)
    wait_until(
        lambda: owned.tell({"name": "first"}) or "name" in connection.call(state.leases(), 10)["node.1"], "its number"
    )
    entry = {"node": 1, "name": "first", "where": ""}
    wait_until(lambda: connection.call(state.leases(), 10).get("owner.trainer") == entry, "its role")
    assert not told.is_set()


def test_a_node_whose_number_is_anothers_leaves_its_lease_alone(connection: Connection, subjects: Subjects) -> None:
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    away, other = (Owned(connection, state, Assignment(1, name, {"rollout": 1}), 30.0) for name in ("away", "other"))

    def told(owned: Owned, name: str) -> str:
        owned.tell({"name": name})
        told = owned._telling
        assert told is not None
        told.result(10)
        return str(connection.call(state.leases(), 10)["node.1"]["name"])

    assert told(away, "away") == "away"
    connection.call(state.release_lease("node", 1), 10)
    assert told(other, "other") == "other"
    assert told(away, "away") == "other"
    away.drop()
    assert connection.call(state.leases(), 10)["node.1"] == {"name": "other", "where": ""}
    other.drop()
    assert "node.1" not in connection.call(state.leases(), 10)


def test_of_two_living_nodes_of_one_name_only_one_takes_part(
    connection: Connection, subjects: Subjects, address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    config = load_config(TINY, ["supervision.heartbeat=1"])
    monkeypatch.setattr(remote, "CLAIM_SECONDS", 1.0)
    monkeypatch.setattr(remote, "OWNER_SECONDS", 4.0)
    monkeypatch.setattr(owners, "OWNER_SECONDS", 2.0)
    wanted = [Wanted(subjects.run, "twin", ["trainer"], tmp_path, tmp_path, tmp_path / name) for name in ("a", "b")]
    first, second = (Remote(address, one) for one in wanted)
    lives = [Assignment(1, "twin", {"trainer": 1}, where(node.folder)) for node in (first, second)]
    owned, other = (Owned(connection, state, life, 2.0) for life in lives)
    over = threading.Event()
    thread = threading.Thread(target=lambda: keep(owned, over, lambda: owned.tell({})))
    try:
        assert first._claim(first._state(), config) == 1
        assert first._claim(first._state(), config) == 1  # another life of the same node
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


def test_a_folder_that_only_has_the_path_of_the_store_is_refused(
    connection: Connection, subjects: Subjects, address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "STORE_SECONDS", 0.0)
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))
    config = load_config(TINY, [f"run.name={subjects.run}", f"store.path={tmp_path / 'store'}"])
    connection.call(publish_run(state, config, ""), 10)
    connection.call(publish_scale(state, "far", {"rollout": 3}), 10)
    connection.call(publish_run(state, config, "", finished=True), 10)
    found = connection.call(published_run(state), 10)
    assert found is not None
    assert found.mark == mark_of(tmp_path / "store") != ""
    assert found.scaled == {"far": {"rollout": 3}}
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mark").write_text("another")
    for name, error in (("empty", "has no file 'mark'"), ("other", "is another run's"), ("store", "")):
        node = Remote(address, Wanted(subjects.run, "far", [], tmp_path / name, tmp_path, tmp_path / f"work-{name}"))
        try:
            if error:
                with pytest.raises(ConfigError, match=rf"{name} is not the store of run .*: it {error}.*--store"):
                    node._check_store(found)
            else:
                node._check_store(found)
        finally:
            node._connection.close()
            node._lock.close()


def test_no_password_stays_in_the_urls_of_a_cluster() -> None:
    address = address_of("nats://a%40b:p,w@one:4222,nats://a%40b:p,w@two:4222,nats://three:4222")
    assert address.url == "nats://one:4222,nats://two:4222,nats://three:4222"
    assert (address.user, address.password) == ("a@b", "p,w")
    assert address_of("nats://one:4222,nats://two:4222").user is None


def test_changes_that_come_at_once_are_all_kept(connection: Connection, subjects: Subjects) -> None:
    state = RunState(connection, connection.call(ensure_bucket(connection, subjects, 1), 20))

    async def add() -> None:
        await asyncio.gather(
            *(state.update("run", lambda before: {"n": (before or {"n": 0})["n"] + 1}) for _ in range(8))
        )

    connection.call(add(), 30)
    assert connection.call(state.get("run"), 10) == {"n": 8}


def keep(owned: Owned, over: threading.Event, renew: Callable[[], None] | None = None) -> None:
    while not over.wait(0.5):
        (renew or owned.renew)()
