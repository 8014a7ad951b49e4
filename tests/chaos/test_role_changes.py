"""Kills while a role is added to a live run, gets other code, and is removed: no row is lost, and no bit differs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.messages.operations import OperationRequest
from relax_actors.operations import Operation, OperationLog, State
from relax_actors.operations.states import OUT
from tests.chaos.test_operations import ENDLESS, IN_STATES, ends_well
from tests.support.faults import hit, kill_root, process, wait_for_cell
from tests.support.operation_kills import ended, has_entered, strike_in
from tests.support.role_runs import LENGTHS, SECTION, edit, editable, is_gone, leases_of, versions
from tests.support.running import ON_POLICY, Run, wait_until

MakeRun = Callable[..., Run]
ADD = OperationRequest("add_role", "lengths", settings=LENGTHS)
REMOVE = OperationRequest("remove_role", "lengths")
REPLACE = OperationRequest("replace_role", "lengths")
WRONG = "raise ArithmeticError(row.id)", "return [len(sample.tokens) for sample in row.trajectory.samples]"


def strike_at(run: Run, victim: str) -> Callable[[], None]:
    """Return a function that kills a process, an actor only if it has begun; a killed root is started again."""

    def strike() -> None:
        if victim == "root":
            kill_root(run)
            run.start()
            wait_until(run.folder.address.exists, "broker.json")
        elif victim == "broker":
            hit(run, victim)
        elif (pid := process(run, victim)) is not None:
            os.kill(pid, 9)

    return strike


def after_strike(run: Run, request: OperationRequest, state: State, victim: str) -> Operation:
    """Request an operation, kill a process in a state of it, and return the operation when it has ended."""
    operation = strike_in(run, request, state, strike_at(run, victim))
    if victim == "root":
        wait_until(lambda: process(run, "trainer.0") is not None, "the trainer", 60)
    return operation


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["lengths.0", "broker", "root"])
def test_role_is_added_and_removed_although_processes_are_killed(
    make_run: MakeRun, tmp_path: Path, victim: str
) -> None:
    run = editable(make_run, tmp_path, "changing", *ON_POLICY, *ENDLESS).start()
    wait_for_cell(run, "batch.0")
    states = (State.CREATING, State.READY) if victim == "root" else OUT[:-1]
    for n, state in enumerate(states):
        assert after_strike(run, ADD, state, victim).state is State.ACTIVE
        wait_until(lambda: len(leases_of(run, "lengths")) == 2, "both actors", 60)
        wait_until(lambda: run.table.list_subjects(run.table.subjects.column("lengths")), "cells of the role", 60)
        removal = IN_STATES[n % len(IN_STATES)]
        assert after_strike(run, REMOVE, removal, victim).state is State.REMOVED
        wait_until(lambda: is_gone(run, "lengths"), "end of all that the role had", 60)
    ends_well(run, make_run("calm", *ON_POLICY))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["lengths.0", "broker", "node", "root"])
def test_code_is_replaced_although_processes_are_killed(make_run: MakeRun, tmp_path: Path, victim: str) -> None:
    run = editable(make_run, tmp_path, "replaced", *ON_POLICY, *ENDLESS, more=SECTION).start()
    wait_until(lambda: len(versions(run)) == 2 and wait_for_cell(run, "batch.0") is None, "both actors", 120)
    before = versions(run)
    edit(run, "Count the tokens", "Count all tokens")
    replaced = after_strike(run, REPLACE, State.REPLACING, victim)
    assert replaced.state is State.ACTIVE, replaced.reason
    assert replaced.plan is not None
    wait_until(lambda: versions(run) == [replaced.plan.code] * 2, "the new code in both actors", 60)
    assert replaced.plan.code not in before
    ends_well(run, make_run("calm", *ON_POLICY))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["lengths.0", "broker"])
def test_code_that_fails_is_taken_back_and_costs_no_row(make_run: MakeRun, tmp_path: Path, victim: str) -> None:
    run = editable(make_run, tmp_path, "returned", *ON_POLICY, *ENDLESS, more=SECTION).start()
    wait_until(lambda: len(versions(run)) == 2 and wait_for_cell(run, "batch.0") is None, "both actors", 120)
    before = versions(run)
    edit(run, WRONG[1], WRONG[0])
    number = OperationLog(run.table).request(REPLACE).id
    wait_until(lambda: has_entered(run, number, State.RETURNING), State.RETURNING, 120)
    strike_at(run, victim)()
    operation = ended(run, number)
    assert (operation.state, "lengths.0 ended" in operation.reason) == (State.FAILED, True)
    wait_until(lambda: versions(run) == before, "the former code in both actors", 60)
    edit(run, WRONG[0], WRONG[1])
    ends_well(run, make_run("calm", *ON_POLICY))
