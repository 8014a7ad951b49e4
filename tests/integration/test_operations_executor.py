"""The executor of operations with a real table and bucket, nodes that are leases, and a clock of the test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from broker.connection import Connection
from broker.table import Table
from relax_actors.data.model_folder import prepare
from relax_actors.messages.operations import OperationPlan, OperationRequest
from relax_actors.operations import OperationLog, State
from relax_actors.operations.engines import KEYS, save_key
from relax_actors.operations.plan import FIRST_ENGINE
from relax_actors.operations.states import OUT
from relax_actors.supervision.assignment import Assignment
from relax_actors.supervision.operations import LOST_SECONDS, START_SECONDS
from relax_actors.supervision.streams import fetch_run_record
from tests.support.engine_servers import KEY, answers_of, server
from tests.support.executors import Executor, begun, saved_run
from tests.support.messages import assert_says
from tests.support.running import SUPPORT

LATE = 1e5
LEASE = {"pid": 5, "incarnation": 1, "since": 1.0, "rows": [], "waits_for": None, "doing_since": None}
PLAN = OperationPlan(0, "main", 1, 2, ["rollout.1"])
ENGINE_PLAN = OperationPlan(0, "main", 0, 1, [f"rollout.{FIRST_ENGINE}"])


Start: TypeAlias = Callable[..., Executor]


@pytest.fixture
def start(table: Table, connection: Connection, tmp_path: Path) -> Start:
    """Save the configuration of a run."""
    return partial(saved_run, table, connection, tmp_path / "run")


def test_deadline_of_an_operation_begins_again_when_the_run_resumes(start: Start) -> None:
    run = start("rollout.replicas=4")
    run.node(0, "main", "rollout.0")
    number = begun(run, OperationRequest("scale", target=2, seconds=30.0), State.CREATING, PLAN)
    run.seconds = LATE  # the run was down for that long
    root = run.root()
    root.step()
    assert (run.operation(number).state, run.replicas()) == (State.CREATING, 2)
    run.seconds += 31
    root.step()
    assert run.operation(number).state is State.FAILED
    root.step()
    assert run.replicas() == 4, "the configuration of `relax up` counts, not the number before the operation"


def test_operation_waits_for_the_node_after_the_run_has_resumed(start: Start) -> None:
    run = start()
    number = OperationLog(run.table).request(OperationRequest("scale", target=2, seconds=1.0)).id
    root = run.root()
    root.step()
    run.seconds += START_SECONDS - 1
    root.step()
    assert run.operation(number).state is State.PENDING
    run.seconds += 2
    root.step()
    assert "not up" in run.operation(number).reason


def test_time_of_the_client_has_no_effect_on_the_deadline(start: Start) -> None:
    run = start()
    run.node(0, "main", "rollout.0")
    ahead = OperationLog(run.table, clock=lambda: 1.0)
    number = ahead.request(OperationRequest("scale", target=2, seconds=30.0)).id
    root = run.root()
    root.step()
    assert run.operation(number).state is State.CREATING
    run.seconds += 31
    root.step()
    assert run.operation(number).state is State.FAILED
    root.step()
    assert run.replicas() == 1


def test_role_that_shares_its_section_is_refused_and_holds_no_other_operation(start: Start) -> None:
    held_out = ("eval.data.kind=python", "eval.data.function=tiny_tasks.make")
    run = start(*held_out, toml=SUPPORT / "tiny_examples.toml")
    run.node(0, "main", "held_out.0", "examples.0", "advantages.0")
    log = OperationLog(run.table)
    number = log.request(OperationRequest("scale", "held_out", target=2)).id
    # As of a former root that planned it, before a scalable role of the same run.
    planned = begun(
        run, OperationRequest("scale", "nobody", target=2), State.CREATING, OperationPlan(0, "main", 1, 2, ["nobody.1"])
    )
    root = run.root()
    root.step()
    root.step()
    assert "shares [examples]" in run.operation(number).reason
    assert "no role 'nobody'" in run.operation(planned).reason
    assert run.replicas("examples") == 1


def test_changes_of_one_node_that_joined_are_published_together(start: Start) -> None:
    run = start()
    run.node(0, "main", "rollout.0", "reward.0")
    run.node(1, "far", *(f"rollout.{n}" for n in (1000, 1001)), "reward.1000")
    log = OperationLog(run.table)
    into = log.request(OperationRequest("scale", target=1, node="far", force=True)).id
    out = log.request(OperationRequest("scale", "reward", target=2, node="far")).id
    root = run.root()
    root.step()
    assert [run.operation(number).state for number in (into, out)] == [State.DRAINING, State.CREATING]
    record = run.table.call(fetch_run_record(run.state))
    assert record is not None
    assert record.scaled["far"] == {"rollout": 1, "reward": 2}
    assert record.expelled["far"] == ["rollout.1001"]
    sequence = run.table.connection.call(last_write(run), 10)
    root.step()
    assert run.table.connection.call(last_write(run), 10) == sequence, "nothing is written again"


async def last_write(run: Executor) -> int:
    """Return the sequence of the last write to the run's bucket."""
    info = await run.table.connection.js.stream_info(f"KV_{run.table.subjects.state_bucket}")
    return info.state.last_seq


def test_delta_on_a_node_that_joined_counts_from_the_wanted_number(start: Start) -> None:
    run = start()
    run.node(0, "main", "rollout.0")
    run.node(1, "far", "rollout.1000")
    log, root = OperationLog(run.table), run.root()
    first = log.request(OperationRequest("scale", target=3, node="far", seconds=10.0)).id
    root.step()
    run.node(1, "far", "rollout.1000", "rollout.1001", "rollout.1002")
    cancelled = log.cancel(first, "test")
    assert cancelled.state is State.CANCELLED
    root.step()  # those that were started still leave
    second = log.request(OperationRequest("scale", delta=1, node="far")).id
    root.step()
    plan = run.operation(second).plan
    assert plan is not None
    assert (plan.before, plan.after) == (1, 2)


def test_lost_number_of_a_node_ends_its_scale_in(start: Start) -> None:
    run = start()
    run.node(0, "main", "rollout.0")
    run.node(1, "far", "rollout.1000", "rollout.1001")
    number = OperationLog(run.table).request(OperationRequest("scale", target=1, node="far")).id
    root = run.root()
    root.step()
    assert run.operation(number).state is State.DRAINING
    run.node(1, "newcomer", "rollout.1000", "rollout.1001")
    run.table.call(run.state.renew_lease("rollout", 1001, LEASE, 600))
    root.step()
    root.step()
    assert run.operation(number).state is State.REMOVED
    assert "rollout.1001" in run.table.call(run.state.leases()), "the newcomer's actor keeps its lease"


def test_engine_needs_rollouts_on_the_node_of_relax_up(start: Start) -> None:
    run = start()
    run.node(0, "main", "trainer.0")
    number = OperationLog(run.table).request(OperationRequest("add_engine", url="http://127.0.0.1:9")).id
    run.root().step()
    assert "no rollouts" in run.operation(number).reason


def test_removal_of_a_lost_engine_is_tried_again(start: Start) -> None:
    run = start("rollout.backend=sglang", "supervision.heartbeat=7")
    client = f"rollout.{FIRST_ENGINE}"
    run.node(0, "main", client)  # the last rollout, which is not removed
    log, request = OperationLog(run.table), OperationRequest("add_engine", url="http://127.0.0.1:9")
    engine = log.request(request).id
    log.advance(engine, State.CONNECTING)
    for state in OUT[OUT.index(State.HEALTH_CHECKING) :]:
        log.advance(engine, state, plan=OperationPlan(0, "main", 0, 1, [client]))
    root = run.root()
    for _ in range(2):  # at the second look it has not answered for 6 seconds
        root.step()
        run.seconds += 6
    assert [o for o in log.read().operations.values() if o.request.engine == engine] == []
    for _ in range(2):
        root.step()
        run.seconds += 6
    removals = [o for o in log.read().operations.values() if o.request.engine == engine]
    assert [o.state for o in removals] == [State.FAILED]
    assert "last rollout" in removals[0].reason
    run.node(0, "main", client, "rollout.0")
    for _ in range(3):
        run.seconds += 10 * LOST_SECONDS
        root.step()
    removals = [o for o in log.read().operations.values() if o.request.engine == engine]
    assert [o.state for o in removals] == [State.FAILED, State.DRAINING]


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        ("/model_info", {"model_type": "llama"}, "model_type llama"),
        ("/server_info", {"version": "0.4.1"}, "SGLang 0.4.1"),
        ("/tokenize", {"tokens": [1, 2, 3]}, "another tokenizer"),
    ],
)
def test_engine_of_something_else_is_refused_and_starts_nothing(
    start: Start, path: str, change: dict[str, Any], said: str
) -> None:
    run = start("rollout.backend=sglang")
    config = run.folder.load_config()
    prepare(config, config.model_path)
    run.node(0, "main", "rollout.0")
    log, root, answers = OperationLog(run.table), run.root(), answers_of(config)
    with server(answers | {path: answers[path] | change}) as url:
        request = OperationRequest("add_engine", url=url, key_file=save_key(config.store_path, KEY))
        number = log.request(request).id
        root.step()
        operation = run.operation(number)
    assert (operation.state, operation.plan, said in operation.reason) == (State.FAILED, None, True), operation.reason
    root.step()
    assert not run.folder.engines.exists()
    assert Assignment.load(run.folder, config).engines == []
    assert log.read().engines() == []


def test_removal_of_the_last_rollout_is_refused_and_changes_nothing(start: Start) -> None:
    run = start("rollout.backend=sglang")
    client = f"rollout.{FIRST_ENGINE}"
    run.node(0, "main", client)
    engine = begun(run, OperationRequest("add_engine", url="http://127.0.0.1:9"), State.CONNECTING, ENGINE_PLAN)
    log = OperationLog(run.table)
    for state in OUT[OUT.index(State.HEALTH_CHECKING) :]:
        log.advance(engine, state)
    removal = log.request(OperationRequest("remove_engine", engine=engine)).id
    run.root().step()
    operation = run.operation(removal)
    assert (operation.state, operation.plan) == (State.FAILED, None)
    assert_says(operation.reason, engine, "last rollout", "add another")
    assert [o.id for o in log.read().engines()] == [engine]


def test_unused_key_is_removed_although_no_operation_runs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    root = run.table.store.root
    unused = root / KEYS / save_key(root, "unused")
    monkeypatch.setattr("relax_actors.operations.engines.MIN_AGE", 0.0)
    run.root().step()
    assert not unused.exists()
