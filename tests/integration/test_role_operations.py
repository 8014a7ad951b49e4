"""Operations on the roles of a run, over all that may go wrong between their cells."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest

from broker.connection import Connection
from broker.errors import BrokerError
from broker.table import Table
from relax_actors.config import Config
from relax_actors.messages.operations import OperationPlan, OperationRequest
from relax_actors.operations import OperationLog, State
from relax_actors.runtime.user_code import code_files, keep_code
from relax_actors.supervision.assignment import Assignment, Code, parse
from relax_actors.supervision.desired import with_operations
from relax_actors.supervision.operations import TRIAL_CRASHES
from relax_actors.supervision.streams import RunRecord, fetch_run_record, publish_run
from tests.support.executors import Executor, begun, saved_run
from tests.support.running import SUPPORT

Start: TypeAlias = Callable[..., Executor]
ACTOR = {"actor": "tiny_lengths.Lengths"}
SECTION = "roles.lengths.actor=tiny_lengths.Lengths"
PLAN = OperationPlan(0, "main", 0, 1, ["lengths.0"])
REMOVAL = OperationPlan(0, "main", 1, 0, ["lengths.0"])


@pytest.fixture
def start(table: Table, connection: Connection, tmp_path: Path) -> Start:
    """Save the configuration of a run."""
    return partial(saved_run, table, connection, tmp_path / "run")


def addition(**settings: object) -> OperationRequest:
    return OperationRequest("add_role", "lengths", settings=json.dumps({**ACTOR, **settings}), seconds=30.0)


def assignment(run: Executor) -> Assignment:
    return Assignment.load(run.folder, run.folder.load_config())


@pytest.mark.parametrize(
    ("settings", "said"), [({"secrets": ["API_KEY"]}, "gets no secrets"), ({"gpus": 1}, "computes on GPUs")]
)
def test_planned_addition_of_another_author_is_checked_as_well(
    start: Start, settings: dict[str, object], said: str
) -> None:
    run = start()
    run.node(0, "main", "rollout.0")
    # Whoever may request an operation may write the cell with its plan as well.
    number = begun(run, addition(**settings), State.CREATING, PLAN)
    run.root().step()
    failed = run.operation(number)
    assert (failed.state, said in failed.reason) == (State.FAILED, True), failed.reason
    assert "lengths" not in run.folder.load_config().roles
    assert "lengths" not in assignment(run).roles


def test_addition_that_the_broker_refuses_delays_no_other_operation(start: Start) -> None:
    run = start()
    run.node(0, "main", "rollout.0")

    def refuse(config: Config) -> None:
        if "lengths" in config.roles:
            msg = "user lengths: authorization violation"
            raise BrokerError(msg)

    run.open_run = refuse
    number = begun(run, addition(), State.CREATING, PLAN)
    other = OperationLog(run.table).request(OperationRequest("scale", target=2)).id
    root = run.root()
    root.step()
    assert (run.operation(number).state, run.operation(other).state) == (State.CREATING, State.CREATING)
    run.seconds += 31
    root.step()
    assert run.operation(number).state is State.FAILED
    assert "authorization violation; an external server must reload" in run.operation(number).reason


def test_failed_removal_of_a_role_that_is_gone_stops_no_operation(start: Start) -> None:
    run = start(SECTION)
    run.node(0, "main", "rollout.0", "lengths.0")
    root = run.root()
    number = begun(run, OperationRequest("remove_role", "lengths"), State.DRAINING, REMOVAL)
    root.step()
    assert "lengths" not in run.folder.load_config().roles
    assert OperationLog(run.table).advance(number, State.FAILED, reason="a test") is not None
    other = OperationLog(run.table).request(OperationRequest("scale", target=2)).id
    root.step()
    assert run.operation(other).state is State.CREATING


def test_role_with_actors_on_another_node_is_not_removed(start: Start) -> None:
    run = start(SECTION)
    run.node(0, "main", "rollout.0", "lengths.0")
    run.node(1, "far", "lengths.1000")
    number = OperationLog(run.table).request(OperationRequest("remove_role", "lengths")).id
    run.root().step()
    failed = run.operation(number)
    assert (failed.state, "node 1 far has actors of lengths" in failed.reason) == (State.FAILED, True), failed.reason
    assert "lengths" in run.folder.load_config().roles


def test_removed_role_leaves_no_copy_of_its_code_for_a_later_addition(start: Start) -> None:
    run = start(SECTION)
    node = assignment(run)
    codes = {"lengths.0": Code("old", "1"), "lengths": Code("old"), "reward.0": Code("own", "2")}
    gone = Assignment(0, "main", node.roles, code=codes, kept={"lengths": "old"}, on_probation=["lengths.0"])
    left = gone.without_role("lengths")
    assert (left.code, left.kept, left.on_probation) == ({"reward.0": Code("own", "2")}, {}, [])


def replacing(run: Executor) -> int:
    """Begin a replacement of the code of the role, and return its number."""
    config = run.folder.load_config()
    version = keep_code(config.store_path, code_files(config, "lengths", SUPPORT))
    plan = OperationPlan(0, "main", 1, 1, ["lengths.0"], version, version)
    return begun(run, OperationRequest("replace_role", "lengths"), State.REPLACING, plan)


def test_former_crashes_of_an_actor_do_not_count_against_its_new_code(start: Start) -> None:
    run = start(SECTION)
    run.node(0, "main", "rollout.0", "lengths.0", crashes=TRIAL_CRASHES, since=1.0)
    root, number = run.root(), replacing(run)
    root.step()
    assert run.operation(number).state is State.REPLACING
    entry = assignment(run).code["lengths.0"]
    assert entry.since == str(number)
    later = run.operation(number).times[State.REPLACING] + 1
    run.node(0, "main", "lengths.0", crashes=TRIAL_CRASHES, since=later)
    root.step()
    assert run.operation(number).state is State.REPLACING, "the actor has ended with the former code"
    run.node(0, "main", "lengths.0", crashes=TRIAL_CRASHES, since=later, code_since=entry.since)
    root.step()
    assert run.operation(number).state is State.RETURNING
    # Actors that start later must not import the files that failed.
    root.step()
    assert assignment(run).code_of("lengths.7") == Code(entry.version)


def test_role_that_does_not_start_on_another_node_comes_back(start: Start) -> None:
    run = start()
    run.node(0, "main", "trainer.0", "rollout.0")
    run.node(1, "far", "reward.1000")
    request = OperationRequest("move_role", "trainer", node="far", seconds=30.0)
    root, number = run.root(), OperationLog(run.table).request(request).id
    root.step()
    assert (run.operation(number).state, "trainer" in assignment(run).roles) == (State.DRAINING, False)
    assert on_far(run).roles == {"reward": 1}, "no two nodes have the role at the same time"
    run.node(0, "main", "rollout.0")
    root.step()
    assert run.operation(number).state is State.CREATING
    assert on_far(run).roles.keys() == {"reward", "trainer"}
    run.seconds += 31
    root.step()
    assert (run.operation(number).state, "CREATING" in run.operation(number).reason) == (State.FAILED, True)
    root.step()
    assert ("trainer" in assignment(run).roles, on_far(run).roles) == (True, {"reward": 1})
    other = run.root()  # after `relax up` has started again, its command says where the roles are
    run.table.call(publish_run(run.state, run.folder.load_config(), str(SUPPORT), starts=True))
    other.step()
    assert fetched(run).moved == {}


@pytest.mark.parametrize("starts", [True, False], ids=["starts in time", "never starts"])
def test_role_that_does_not_leave_its_node_in_time_is_stopped_and_has_as_long_to_start(
    start: Start, *, starts: bool
) -> None:
    run = start()
    run.node(0, "main", "rollout.0")
    run.node(1, "far", "trainer.0")
    request = OperationRequest("move_role", "trainer", node="0", seconds=30.0)
    root, number = run.root(), OperationLog(run.table).request(request).id
    root.step()
    assert fetched(run).expelled.get("far", []) == []
    run.seconds += 31
    root.step()
    assert (run.operation(number).state, on_far(run).expelled) == (State.DRAINING, ["trainer.0"])
    run.node(1, "far")
    root.step()
    assert (run.operation(number).state, "trainer" in assignment(run).roles) == (State.CREATING, True)
    assert (on_far(run).roles.keys(), on_far(run).expelled) == ({"reward"}, [])
    if starts:
        run.seconds += 29
        run.node(0, "main", "rollout.0", "trainer.0")
        lease = {"pid": 5, "incarnation": 1, "since": 1.0, "rows": [], "waits_for": "a row", "doing_since": None}
        run.table.call(run.state.renew_lease("trainer", 0, lease, 600))
        root.step()
        assert run.operation(number).state is State.ACTIVE
        return
    run.seconds += 31
    root.step()
    assert run.operation(number).state is State.FAILED
    assert "still CREATING after 30 s" in run.operation(number).reason
    assert (on_far(run).roles.keys(), "trainer" in assignment(run).roles) == ({"reward", "trainer"}, False)


def fetched(run: Executor) -> RunRecord:
    record = run.table.call(fetch_run_record(run.state))
    assert record is not None
    return record


def on_far(run: Executor) -> Assignment:
    """What a node that joined should have."""
    config = run.folder.load_config()
    return with_operations(parse(config, 1, "far", ["reward"]), config, fetched(run))


@pytest.mark.parametrize(
    ("role", "node", "said"),
    [
        ("reward", "far", "reward is a pool, whose actors are on any node"),
        ("trainer", "away", "the run has no node 'away'; its nodes are 0 main; 1 far; 2 twin"),
        ("trainer", "twin", "2 nodes with the name 'twin', so give a number; its nodes are 0 main"),
        ("nobody", "far", "the run has no role 'nobody'"),
    ],
)
def test_roles_and_nodes_that_do_not_fit_are_refused(start: Start, role: str, node: str, said: str) -> None:
    run = start()
    run.node(0, "main", "trainer.0", "reward.0")
    run.node(1, "far", "reward.1000")
    for twin in (2, 3):
        run.node(twin, "twin", f"reward.{twin}000")
    number = OperationLog(run.table).request(OperationRequest("move_role", role, node=node)).id
    run.root().step()
    assert (run.operation(number).state, said in run.operation(number).reason) == (State.FAILED, True)
    assert "trainer" in assignment(run).roles


def test_code_is_replaced_on_nodes_that_joined_and_stays_for_later_actors(start: Start) -> None:
    run = start(SECTION)
    run.node(0, "main", "rollout.0")
    run.node(1, "far", "lengths.1000")
    config = run.folder.load_config()
    version = keep_code(config.store_path, code_files(config, "lengths", SUPPORT))
    plan = OperationPlan(1, "far", 1, 1, ["lengths.1000"], version, version)
    root, number = run.root(), begun(run, OperationRequest("replace_role", "lengths"), State.REPLACING, plan)
    root.step()
    node = with_operations(parse(config, 1, "far", ["lengths"]), config, fetched(run))
    assert node.code_of("lengths.1000") == Code(version, str(number))
    assert node.code_of("lengths.1001") == Code(version)


def test_node_that_was_away_while_code_was_replaced_starts_with_the_new_code(start: Start) -> None:
    run = start(SECTION)
    run.node(0, "main", "rollout.0", "lengths.0")
    config = run.folder.load_config()
    new = keep_code(config.store_path, code_files(config, "lengths", SUPPORT))
    plan = OperationPlan(0, "main", 2, 2, ["lengths.0", "lengths.1000"], new, "0" * 16)
    root, number = run.root(), begun(run, OperationRequest("replace_role", "lengths"), State.REPLACING, plan)
    root.step()
    lease = {"pid": 5, "incarnation": 1, "since": 1.0, "rows": [], "waits_for": None, "doing_since": None}
    run.table.call(run.state.renew_lease("lengths", 0, {**lease, "code": new, "has_worked": True}, 600))
    root.step()
    assert run.operation(number).state is State.ACTIVE
    assert with_operations(parse(config, 1, "far", ["lengths"]), config, fetched(run)).code_of("lengths.1000") == Code(
        new, str(number)
    )
