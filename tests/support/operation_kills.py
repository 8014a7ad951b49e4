"""Kills of a run's processes in the states of an operation, and what the run holds before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import nats.errors

from broker.errors import BrokerError
from broker.leases import RunState
from broker.streams import open_bucket
from broker.subjects import Subjects
from relax_actors.operations import Operation, OperationLog, State
from tests.support.faults import held, kill_root, process
from tests.support.kills import stopped_root
from tests.support.running import Run, wait_until

ROOT = "root"
Plan = Mapping[State, Sequence[str]]
"""Processes to kill by the state in which they are killed."""
Met = set[tuple[str, State]]
"""Processes that were killed while the operation was in the state."""


def latin(victims: Sequence[str], states: Sequence[State], together: int = 1) -> list[Plan]:
    """Return plans in which each process is killed in each state, `together` processes in each state of a plan."""
    count = -(-len(victims) // together)
    groups = [victims[n * together : (n + 1) * together] for n in range(count)]
    return [{state: groups[(i + n) % count] for i, state in enumerate(states)} for n in range(count)]


def struck(run: Run, begin: Callable[[], int], plan: Plan) -> tuple[Operation, Met]:
    """Kill processes as soon as an operation enters each state of a plan; return the operation when it has ended.

    Args:
        run: the run.
        begin: requests the operation, and returns its number. `relax up` is stopped meanwhile, so that the first state
            of the plan is met if it is PENDING; other states may be as short as the writing of two cells.
        plan: processes by state, in the order of the states.
    """
    met: Met = set()
    number = 0
    for state, victims in plan.items():
        with ExitStack() as stack:
            # Finding a process takes longer than some states last.
            aims = [stack.enter_context(held(run, v)) for v in victims if v != ROOT and process(run, v) is not None]
            if number:
                wait_until(partial(has_entered, run, number, state), f"operation {number} in {state}", 300)
                # An actor that the operation starts has had no process before.
                found = {aim.target for aim in aims} | {ROOT}
                aims += [stack.enter_context(held(run, v)) for v in victims if v not in found and process(run, v)]
            with stopped_root(run):
                number = number or begin()
                is_met = operation_of(run, number).state is state
                dead = {aim.target for aim in aims if aim.is_struck()}
                if ROOT in victims and run.process is not None:
                    run.process.kill()
                    dead.add(ROOT)
        if is_met:
            met |= {(target, state) for target in dead}
        if ROOT in victims:
            kill_root(run)
            run.start()
            wait_until(run.folder.address.exists, "broker.json")
    return ended(run, number), met


def operation_of(run: Run, number: int) -> Operation:
    """Return an operation as it is now."""
    return OperationLog(run.table).read().operations[number]


def has_entered(run: Run, number: int, state: State) -> bool:
    """Whether an operation has entered a state, or has ended; over restarts of the broker."""
    try:
        operation = operation_of(run, number)
    except BrokerError:
        return False
    return state in operation.times or operation.is_over


def ended(run: Run, number: int) -> Operation:
    """Wait for the end of an operation, over restarts of the broker."""

    def find() -> Operation | None:
        try:
            operation = operation_of(run, number)
        except BrokerError:
            return None
        return operation if operation.is_over else None

    operation: Operation = wait_until(find, f"end of operation {number}", 300)
    return operation


def state_of(run: Run) -> RunState:
    """Bucket of a live run."""
    return RunState(run.connection, run.connection.call(open_bucket(run.connection, Subjects(run.name)), 20))


def actors_of(run: Run) -> list[str]:
    """Rollout actors with a lease."""
    return sorted(run.connection.call(state_of(run).leases("rollout"), 10))


def holdings(run: Run) -> dict[str, Any]:
    """Leases, GPUs, actors and keys of engines that a live run holds, and the number of its consumers."""
    leases = run.connection.call(state_of(run).leases(), 10)
    stream = run.connection.call(run.connection.js.stream_info(Subjects(run.name).table_stream), 10)
    keys = run.folder.root / "store" / "engine-keys"
    return {
        "leases": sorted(leases),
        "consumers": stream.state.consumer_count,
        "gpus": {name: lease["gpus"] for name, lease in leases.items() if "gpus" in lease},
        "children": {name: sorted(lease["children"]) for name, lease in leases.items() if "children" in lease},
        "keys": sorted(path.name for path in keys.iterdir()) if keys.is_dir() else [],
    }


def wait_for_holdings(run: Run, wanted: dict[str, Any]) -> None:
    """Wait until a run holds what it held before, over restarts of the broker."""
    last: dict[str, Any] = {}

    def holds() -> bool:
        with suppress(BrokerError, nats.errors.Error):
            last.update(holdings(run))
        return last == wanted

    try:
        wait_until(holds, "release of what an operation held", 180)
    except AssertionError as error:
        raise AssertionError(f"{error}: {last}, before: {wanted}") from None
