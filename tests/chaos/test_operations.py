"""Kills in every state of an operation: it ends, nothing is lost or left behind, and the weights are the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import httpx
import pytest

from broker.errors import BrokerError
from broker.leases import RunState
from broker.streams import open_bucket
from broker.subjects import Subjects
from relax_actors.messages.operations import OperationRequest
from relax_actors.operations import Operation, OperationLog, State
from relax_actors.operations.states import IN, OUT
from tests.support.faults import hit, kill_root, leftovers, port_of, process, story_of, wait_for_cell
from tests.support.gateways import AGENTS, address_of
from tests.support.running import ON_POLICY, Run, wait_until

MakeRun = Callable[..., Run]
ENDLESS = ("run.steps=100000", "reward.function=tiny_tasks.slow_share_of_sevens", "supervision.heartbeat=4")
OUT_STATES, IN_STATES = OUT[:-1], IN[:-1]


def strike_in(run: Run, request: OperationRequest, state: State, strike: Callable[[], object]) -> Operation:
    """Request an operation, strike when it enters a state, and return it when it has ended."""
    number = OperationLog(run.table).request(request).id
    wait_until(lambda: has_entered(run, number, state), f"operation in {state}", 90)
    strike()
    return ended(run, number)


def has_entered(run: Run, number: int, state: State) -> bool:
    """Whether an operation has entered a state, or has ended."""
    operation = OperationLog(run.table).read().operations[number]
    return state in operation.times or operation.is_over


def ended(run: Run, number: int) -> Operation:
    """Wait for the end of an operation, over restarts of the broker."""

    def find() -> Operation | None:
        try:
            operation = OperationLog(run.table).read().operations[number]
        except BrokerError:
            return None
        return operation if operation.is_over else None

    operation: Operation = wait_until(find, f"end of operation {number}", 120)
    return operation


def actors_of(run: Run) -> list[str]:
    """Rollout actors with a lease."""
    state = RunState(run.connection, run.connection.call(open_bucket(run.connection, Subjects(run.name)), 20))
    return sorted(run.connection.call(state.leases("rollout"), 10))


def rounds(victim: str) -> Iterator[tuple[State, State]]:
    """States of a scale-out and of a scale-in in which to strike; all of them, in as few operations as possible.

    A node imports for seconds before it is back: it is killed in every other state.
    """
    for n, state in enumerate(OUT_STATES):
        if victim != "node" or n % 2:
            yield state, IN_STATES[n // (2 if victim == "node" else 1) % len(IN_STATES)]


def ends_well(run: Run, calm: Run) -> None:
    """Stop a run; check that it lost nothing, left nothing, and has the weights of an undisturbed one."""
    port = port_of(run)
    run.end_in_order()
    wait_until(lambda: not leftovers(run, port), "end of all processes", 30)
    story = story_of(run)
    assert story.of("row_lost") == []
    assert story.of("row_quarantined") == []
    own = story.fingerprints()
    last = max(own)
    assert calm.start(f"run.steps={last}").finish()[0] == 0
    expected = story_of(calm).fingerprints()
    assert {version: print_ for version, print_ in own.items() if expected.get(version) != print_} == {}
    assert last > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["rollout.1", "broker", "node"])
def test_a_kill_in_any_state_loses_nothing(make_run: MakeRun, victim: str) -> None:
    run = make_run("elastic", *ON_POLICY, *ENDLESS).start()
    wait_for_cell(run, "batch.0")

    def strike() -> None:
        # A rollout that has not begun, or has left, cannot be killed.
        if victim != "rollout.1":
            hit(run, victim)
        elif (pid := process(run, victim)) is not None:
            os.kill(pid, 9)

    for out, in_ in rounds(victim):
        assert strike_in(run, OperationRequest("scale", target=2), out, strike).state is State.ACTIVE
        wait_until(lambda: actors_of(run) == ["rollout.0", "rollout.1"], "two rollouts", 60)
        assert (
            strike_in(run, OperationRequest("scale", target=1, force=in_ is State.REMOVING), in_, strike).state
            is State.REMOVED
        )
        wait_until(lambda: actors_of(run) == ["rollout.0"], "one rollout", 60)
    ends_well(run, make_run("calm", *ON_POLICY))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("state", [State.CREATING, State.WEIGHT_SYNCING, State.DRAINING])
def test_an_operation_goes_on_after_the_run_resumes(make_run: MakeRun, state: State) -> None:
    more = ["rollout.replicas=2"] if state in IN else []
    run = make_run("resumed", *ON_POLICY, *ENDLESS, *more).start()
    wait_for_cell(run, "batch.0")
    log = OperationLog(run.table)
    number = log.request(OperationRequest("scale", target=1 if state in IN else 2)).id
    wait_until(lambda: has_entered(run, number, state), state, 90)
    kill_root(run)
    run.start()
    wait_until(run.folder.address.exists, "broker.json")
    operation = ended(run, number)
    assert operation.state is (State.REMOVED if state in IN else State.ACTIVE)
    wanted = ["rollout.0"] if state in IN else ["rollout.0", "rollout.1"]
    wait_until(lambda: actors_of(run) == wanted, f"{len(wanted)} rollouts", 60)
    ends_well(run, make_run("calm", *ON_POLICY))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cancelled_or_late_operation_gives_everything_back(make_run: MakeRun) -> None:
    run = make_run("cancelled", *ON_POLICY, *ENDLESS).start()
    wait_for_cell(run, "batch.0")
    log = OperationLog(run.table)
    number = log.request(OperationRequest("scale", target=3)).id
    wait_until(lambda: has_entered(run, number, State.CREATING), "CREATING", 60)
    assert log.cancel(number, "a test").state is State.CANCELLED
    late = wait_until(lambda: log.request(OperationRequest("scale", target=2, seconds=0.01)).id, "operation")
    failed = ended(run, late)
    assert (failed.state, "after 0.01 s" in failed.reason) == (State.FAILED, True)
    wait_until(lambda: [process(run, f"rollout.{n}") for n in (1, 2)] == [None, None], "end of the new actors", 60)
    wait_until(lambda: actors_of(run) == ["rollout.0"], "one rollout", 60)
    ends_well(run, make_run("calm", *ON_POLICY))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_operation_goes_on_although_the_gateway_that_took_it_is_killed(make_run: MakeRun) -> None:
    run = make_run("gateway", *ON_POLICY, *ENDLESS, config=AGENTS).start()
    wait_for_cell(run, "batch.0")
    url, _ = address_of(run)
    token = (run.folder.root / "gateway" / "operator-token").read_text()
    head = {"Authorization": f"Bearer {token}", "Idempotency-Key": "once"}
    for target, end in ((2, "ACTIVE"), (1, "REMOVED")):
        head["Idempotency-Key"] = f"to-{target}"
        begun = httpx.post(f"{url}/v1/rollouts/scale", json={"target": target}, headers=head, timeout=30).json()
        hit(run, "gateway.0")
        assert ended(run, begun["id"]).state == end
        address_of(run)
        again = httpx.post(f"{url}/v1/rollouts/scale", json={"target": target}, headers=head, timeout=30)
        assert (again.status_code, again.json()["id"]) == (200, begun["id"])
        shown = httpx.get(f"{url}/v1/rollouts", headers=head, timeout=30).json()
        assert shown["total"] == target
    run.end_in_order()
