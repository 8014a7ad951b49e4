"""Kills while a role is added to a live run, gets other code, and is removed: no row is lost, and no bit differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relax_actors.messages.operations import OperationRequest
from relax_actors.operations import OperationLog, State
from tests.chaos.test_operations import ENDLESS, IN_STATES, OUT_STATES, ends_well
from tests.support.faults import hit, process, wait_for_cell
from tests.support.operation_kills import ROOT, Met, ended, has_entered, holdings, struck, wait_for_holdings
from tests.support.role_runs import LENGTHS, SECTION, edit, editable, leases_of, versions
from tests.support.running import ON_POLICY, Run, wait_until

MakeRun = Callable[..., Run]
ADD = OperationRequest("add_role", "lengths", settings=LENGTHS)
REMOVE = OperationRequest("remove_role", "lengths")
REPLACE = OperationRequest("replace_role", "lengths")
RIGHT, WRONG = "return [len(sample.tokens) for sample in row.trajectory.samples]", "raise ArithmeticError(row.id)"
STATES = {ROOT: (State.PENDING, State.CREATING)}
"""States in which `relax up` is killed; other processes in all. After the end of an operation the TOML file counts."""


def requested(run: Run, request: OperationRequest) -> int:
    """Request an operation, and return its number."""
    return OperationLog(run.table).request(request).id


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["lengths.0", "broker", "node", ROOT])
def test_role_is_added_and_removed_although_processes_are_killed(
    make_run: MakeRun, tmp_path: Path, victim: str
) -> None:
    run = editable(make_run, tmp_path, "changing", *ON_POLICY, *ENDLESS).start()
    wait_for_cell(run, "batch.0")
    before, states = holdings(run), STATES.get(victim, (*OUT_STATES, *IN_STATES))
    out = {state: (victim,) for state in OUT_STATES if state in states}
    into = {state: (victim,) for state in IN_STATES if state in states}
    operation, met = struck(run, lambda: requested(run, ADD), out)
    assert operation.state is State.ACTIVE, operation.reason
    wait_until(lambda: len(leases_of(run, "lengths")) == 2, "both actors")
    wait_until(lambda: run.table.list_subjects(run.table.subjects.column("lengths")), "cells of the role")
    # A run that starts again has the roles of its file.
    run.config.write_text(run.config.read_text() + SECTION)
    operation, more = struck(run, lambda: requested(run, REMOVE), into)
    assert operation.state is State.REMOVED, operation.reason
    wait_for_holdings(run, before)
    assert not (run.folder.broker / "keys" / "lengths").exists()
    assert met | more != Met()
    ends_well(run, make_run("calm", *ON_POLICY))


def with_role(make_run: MakeRun, folder: Path, name: str) -> tuple[Run, list[str]]:
    """Start a run that has the role; return it with the version of the code of each actor."""
    run = editable(make_run, folder, name, *ON_POLICY, *ENDLESS, more=SECTION).start()
    wait_for_cell(run, "batch.0")
    wait_until(lambda: len(versions(run)) == 2, "both actors")
    return run, versions(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["lengths.0", "broker", "node", ROOT])
def test_code_is_replaced_although_processes_are_killed(make_run: MakeRun, tmp_path: Path, victim: str) -> None:
    run, before = with_role(make_run, tmp_path, "replaced")
    edit(run, "Count the tokens", "Count all tokens")
    plan = {State.PENDING: (victim,), State.REPLACING: (victim,)}
    operation, met = struck(run, lambda: requested(run, REPLACE), plan)
    assert operation.state is State.ACTIVE, operation.reason
    assert operation.plan is not None
    new = operation.plan.code
    wait_until(lambda: versions(run) == [new] * 2, "the new code in both actors")
    assert new not in before
    assert met != Met()
    ends_well(run, make_run("calm", *ON_POLICY))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["lengths.0", "broker"])
def test_code_that_fails_is_taken_back_and_costs_no_row(make_run: MakeRun, tmp_path: Path, victim: str) -> None:
    run, before = with_role(make_run, tmp_path, "returned")
    edit(run, RIGHT, WRONG)
    number = requested(run, REPLACE)
    wait_until(lambda: has_entered(run, number, State.RETURNING), State.RETURNING, 120)
    if process(run, victim) is not None:
        hit(run, victim)
    operation = ended(run, number)
    assert (operation.state, "lengths.0 ended 2 times" in operation.reason) == (State.FAILED, True), operation.reason
    wait_until(lambda: versions(run) == before, "the former code in both actors")
    edit(run, WRONG, RIGHT)
    ends_well(run, make_run("calm", *ON_POLICY))
