"""Roles that own state move between nodes, and code is replaced on all nodes, although processes are killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.messages.operations import OperationRequest
from relax_actors.operations import OperationLog, State
from tests.chaos.test_operations import ENDLESS, ends_well
from tests.support.faults import kill_root, process, wait_for_cell
from tests.support.nodes import Embedded, Node
from tests.support.operation_kills import Met, Plan, ended, holdings, state_of, struck, wait_for_holdings
from tests.support.role_runs import SECTION, edit, editable, versions
from tests.support.running import ON_POLICY, Run, wait_until

MakeRun = Callable[..., Run]
MakeNode = Callable[..., Node]
OUT: Plan = {
    State.PENDING: ("trainer.0",),
    State.DRAINING: ("broker",),
    State.REMOVING: ("node",),
    State.CREATING: ("far/node",),
    State.CONNECTING: ("far/trainer.0",),
}
BACK: Plan = {
    State.PENDING: ("far/trainer.0",),
    State.DRAINING: ("far/node",),
    State.REMOVING: ("broker",),
    State.CREATING: ("node",),
    State.CONNECTING: ("trainer.0",),
}
"""Processes that are killed in the states of a move to another node, and of the move back."""


def moved(run: Run, node: str) -> int:
    """Request that the trainer moves to a node, and return the number of the operation."""
    return OperationLog(run.table).request(OperationRequest("move_role", "trainer", node=node)).id


def has(run: Run, node: int, actor: str) -> bool:
    """Whether a node has a ready actor."""
    lease = run.connection.call(state_of(run).lease("node", node), 10) or {}
    return bool((lease.get("children") or {}).get(actor, {}).get("phase") == "ready")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_moved_trainer_goes_on_with_the_same_bits_although_processes_are_killed(
    make_run: MakeRun, nodes: MakeNode
) -> None:
    run = make_run("moving", *ON_POLICY, *ENDLESS).start()
    wait_for_cell(run, "batch.0")
    far = nodes(Embedded.of(run), run, "far", "reward")
    wait_until(lambda: has(run, 1, "reward.1000"), "the actor of the other node", 120)
    before = holdings(run)
    operation, met = struck(run, lambda: moved(run, "far"), OUT)
    assert operation.state is State.ACTIVE, operation.reason
    assert process(run, "trainer.0") is None
    wait_until(lambda: process(run, "far/trainer.0"), "the trainer's process on the other node", 60)
    operation, more = struck(run, lambda: moved(run, "0"), BACK)
    assert operation.state is State.ACTIVE, operation.reason
    wait_for_holdings(run, before)
    assert met | more != Met()
    assert ended(run, moved(run, "far")).state is State.ACTIVE
    kill_root(run)
    run.start()
    wait_until(lambda: run.folder.address.exists() and has(run, 0, "trainer.0"), "the trainer of `relax up`", 120)
    assert process(run, "far/trainer.0") is None
    assert far.end(signal.SIGTERM)[0] == 0
    ends_well(run, make_run("calm", *ON_POLICY))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_code_is_replaced_on_all_nodes_although_they_are_killed(
    make_run: MakeRun, nodes: MakeNode, tmp_path: Path
) -> None:
    run = editable(make_run, tmp_path, "spread", *ON_POLICY, *ENDLESS, more=SECTION).start()
    wait_for_cell(run, "batch.0")
    far = nodes(Embedded.of(run), run, "far", "lengths")
    wait_until(lambda: len(versions(run)) == 3, "three actors", 120)
    edit(run, "Count the tokens", "Count all tokens")
    request = OperationRequest("replace_role", "lengths")
    plan = {State.PENDING: ("far/lengths.1000",), State.REPLACING: ("far/node",)}
    operation, met = struck(run, lambda: OperationLog(run.table).request(request).id, plan)
    assert operation.state is State.ACTIVE, operation.reason
    assert operation.plan is not None
    new = operation.plan.code
    wait_until(lambda: versions(run) == [new] * 3, "the new code on both nodes")
    assert met != Met()
    assert far.end(signal.SIGTERM)[0] == 0
    ends_well(run, make_run("calm", *ON_POLICY))
