"""Nodes that may vanish: spot rollouts that are killed, and nodes that leave within a grace period."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from broker.connection import Connection
from broker.leases import RunState
from broker.streams import ensure_bucket, find_consumer
from broker.subjects import Subjects
from relax_actors.messages.operations import OperationRequest
from relax_actors.operations import OperationLog, State
from relax_actors.runtime.blackbox import BlackBox
from relax_actors.runtime.run_folder import RunFolder
from tests.chaos.test_turns import EPISODES
from tests.support.faults import box, is_over, story_of
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.nodes import Node
from tests.support.operation_kills import ended
from tests.support.running import ON_POLICY, Run, wait_until
from tests.support.turn_counter import TurnCounter

NAME = "spot"
MakeRun = Callable[..., Run]


@pytest.fixture
def make_spread(make_guarded: MakeGuarded, make_run: MakeRun) -> Callable[..., tuple[Guarded, Run]]:
    """Make a guarded broker, and a run that uses it and is not up yet."""

    def make(*settings: str) -> tuple[Guarded, Run]:
        guarded = make_guarded([f"run.name={NAME}", *settings])
        guarded.make()
        guarded.start()
        broker = [f"broker.url=nats://127.0.0.1:{guarded.port}", f"broker.credentials={guarded.keys}"]
        return guarded, make_run(NAME, *broker, *settings)

    return make


def holds_rows(node: Node) -> bool:
    """Whether an actor of a node handles rows now."""
    paths = [RunFolder(node.work).black_box(f"{role}.{n}") for role in ("rollout", "reward") for n in (1000, 2000)]
    for path in filter(Path.exists, paths):
        with closing(BlackBox(path)) as box:
            if box.read().rows:
                return True
    return False


def ready_nodes(state: RunState, connection: Connection) -> int:
    """Nodes with an actor of the role rollout that is ready."""
    leases = connection.call(state.leases("node"), 10)
    children = [child for lease in leases.values() for child in (lease.get("children") or {}).items()]
    return sum(name.startswith("rollout.") and child["phase"] == "ready" for name, child in children)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_spot_rollouts_killed_at_random_lose_no_row_and_change_no_bit(
    make_spread: Callable[..., tuple[Guarded, Run]],
    nodes: Callable[..., Node],
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    settings = (*ON_POLICY, "run.steps=16", "rollout.max_tokens=48")
    alone = make_run("calm", *settings).complete()
    guarded, run = make_spread(*settings, "reward.function=tiny_tasks.gated_share_of_sevens")
    run.start()
    wait_until(run.folder.address.exists, "broker.json")
    spot = [nodes(guarded, run, f"spot{n}", "rollout", options=["--spot"]) for n in (1, 2)]
    with closing(Connection(guarded.address("operator"), "test")) as connection:
        state = RunState(connection, connection.call(ensure_bucket(connection, Subjects(NAME)), 20))
        wait_until(lambda: ready_nodes(state, connection) == 3, "two spot rollouts beside the usual one", 120)
    gate.touch()
    chance = random.Random(7)
    for node in spot:
        wait_until(lambda node=node: is_over(run) or holds_rows(node), "rows of a spot actor")
        assert not is_over(run), "the run is too short for this test"
        until = time.monotonic() + chance.uniform(0.0, 0.3)
        wait_until(lambda until=until: time.monotonic() > until, "a random moment")
        node.end(signal.SIGKILL)
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == alone["weights_fingerprint"]
    assert (result["trained"], result["dropped"], result["quarantined"]) == (64, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_node_that_has_to_leave_returns_its_rows_and_leases(
    make_spread: Callable[..., tuple[Guarded, Run]],
    nodes: Callable[..., Node],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    # With a deadline of an hour the run ends only if the rows are returned.
    slow = ("supervision.ack_wait=3600", "reward.function=tiny_tasks.gated_share_of_sevens", "run.steps=4")
    guarded, run = make_spread(*slow)
    run.start("--roles", "prompts,rollout,advantages,trainer")
    wait_until(run.folder.address.exists, "broker.json")
    leaves = nodes(guarded, run, "leaves", "reward", options=["--grace", "6"])
    with closing(Connection(guarded.address("operator"), "test")) as connection:
        state = RunState(connection, connection.call(ensure_bucket(connection, Subjects(NAME)), 20))

        def in_hand() -> int:
            info = connection.call(find_consumer(connection, Subjects(NAME).table_stream, "reward"), 10)
            return 0 if info is None else info.num_ack_pending or 0

        wait_until(lambda: holds_rows(leaves) and in_hand() >= 4, "rows in its hands", 120)
        asked = time.time()
        code, said = leaves.end(signal.SIGTERM, deadline=50)
        assert code == 0, said
        leases = connection.call(state.leases(), 10)
        assert not {"node.1", "reward.1000"} & leases.keys()
        (returned,) = story_of(run).of("rows_returned")
        assert returned["n"] == 1000
        assert 0 < returned["time"] - asked < 50, "long before its role's deadline"
        gate.touch()
        stays = nodes(guarded, run, "stays", "reward")
        code, result, said = run.finish(150)
        assert stays.end()[0] == 0
    assert code == 0, said
    assert (result["trained"], result["dropped"], result["quarantined"]) == (16, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_rollout_that_has_to_leave_writes_its_turns_and_another_goes_on(
    make_spread: Callable[..., tuple[Guarded, Run]], nodes: Callable[..., Node], make_run: MakeRun
) -> None:
    # Only an actor that stops writes turns before they are worth an hour.
    later = ("rollout.turn_log_after=3600", "environment.options.pause=1", "run.steps=1", "supervision.ack_wait=3600")
    settings = (*ON_POLICY, *EPISODES, *later)
    alone = make_run("calm", *settings).complete()
    guarded, run = make_spread(*settings)
    run.start("--roles", "prompts,environment,reward,advantages,trainer")
    wait_until(run.folder.address.exists, "broker.json")
    leaves = nodes(guarded, run, "leaves", "rollout", options=["--grace", "5"])
    counter = TurnCounter(run)
    wait_until(lambda: holds_rows(leaves), "a row in its hands", 120)
    assert leaves.end(signal.SIGTERM, deadline=60)[0] == 0
    stays = nodes(guarded, run, "stays", "rollout")
    code, result, said = run.finish()
    counter.close()
    assert stays.end()[0] == 0
    assert code == 0, said
    assert result["weights_fingerprint"] == alone["weights_fingerprint"]
    assert (result["trained"], result["dropped"], result["quarantined"]) == (4, 0, 0)
    assert counter.twice == []
    assert story_of(run).of("row_resumed")


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_rollout_that_is_scaled_away_during_generation_makes_no_turn_twice(make_run: MakeRun) -> None:
    settings = (*ON_POLICY, *EPISODES, "environment.options.pause=1", "run.steps=2")
    alone = make_run("calm", *settings).complete()
    # With a deadline of an hour the run ends only if the rows are returned.
    run = make_run("scaled", *settings, "rollout.replicas=2", "supervision.ack_wait=3600").start()
    wait_until(run.folder.black_box("rollout.1").exists, "the second rollout", 120)
    counter = TurnCounter(run)

    def has_turns() -> bool:
        assert not is_over(run), "the run is too short for this test"
        rows = set(box(run, "rollout.1").rows)
        return any(row in rows for row, *_ in counter.turns)

    wait_until(has_turns, "a turn of a row of the second rollout", 120)
    request = OperationRequest("scale", target=1, force=True)
    assert ended(run, OperationLog(run.table).request(request).id).state is State.REMOVED
    run.disconnect()
    code, result, said = run.finish()
    counter.close()
    assert code == 0, said
    assert result["weights_fingerprint"] == alone["weights_fingerprint"]
    assert (result["trained"], result["dropped"], result["quarantined"]) == (8, 0, 0)
    assert counter.twice == []
    assert story_of(run).of("row_resumed")
