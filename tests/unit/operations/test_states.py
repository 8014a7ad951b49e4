"""States of operations as a pure function of the cells of the log."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.messages.operations import OperationPlan, OperationRequest, OperationStep
from relax_actors.operations.states import CANCELLABLE, ENDS, IN, OUT, History, State, may_follow

SCALE = OperationRequest("scale", "rollout", target=2)
PLAN = OperationPlan(0, "here", 1, 2, ["rollout.1"])


def history(*steps: OperationStep, first: int = 1) -> History:
    return History().extended(enumerate(steps, first))


def begun(state: State = State.PENDING, number: int = 1, request: OperationRequest = SCALE) -> list[OperationStep]:
    path = IN if state in (State.DRAINING, State.REMOVING, State.REMOVED) else OUT
    later = [OperationStep(number, s, 1.0 + k, plan=PLAN) for k, s in enumerate(path[1 : path.index(state) + 1])]
    return [OperationStep(number, State.PENDING, 0.0, request), *later]


@pytest.mark.parametrize("path", [OUT, IN])
def test_an_operation_goes_through_its_states_in_order(path: tuple[State, ...]) -> None:
    operation = history(*begun(path[-1])).operations[1]
    assert operation.is_over
    assert list(operation.times) == list(path)
    assert operation.plan == PLAN


@pytest.mark.parametrize("state", list(State))
def test_only_an_operation_that_is_not_yet_checked_can_be_cancelled(state: State) -> None:
    assert may_follow(state, State.CANCELLED) == (state in CANCELLABLE)


@pytest.mark.parametrize("end", sorted(ENDS))
def test_nothing_follows_an_end(end: State) -> None:
    assert not any(may_follow(end, state) for state in State)


@given(st.lists(st.sampled_from([*State, "unknown"]), max_size=30))
def test_cells_that_may_not_follow_change_nothing(states: list[str]) -> None:
    steps = [OperationStep(1, State.PENDING, 0.0, SCALE), *(OperationStep(1, s, 1.0) for s in states)]
    operation = history(*steps).operations[1]
    entered = list(operation.times)
    assert all(may_follow(before, after) for before, after in pairwise(entered))
    assert operation.state is entered[-1]


def test_a_step_of_an_operation_that_was_never_requested_is_ignored() -> None:
    assert not history(OperationStep(1, State.CREATING, 0.0)).operations
    assert not history(OperationStep(7, State.PENDING, 0.0, SCALE)).operations


def test_a_malformed_cell_takes_its_number_and_nothing_else() -> None:
    found = History().extended([(1, None), (2, OperationStep(2, State.PENDING, 0.0, SCALE))])
    assert found.last == 2
    assert list(found.operations) == [2]


def test_an_engine_is_part_of_the_run_until_it_is_removed() -> None:
    add = OperationRequest("add_engine", url="http://127.0.0.1:1")
    steps = [OperationStep(1, State.PENDING, 0.0, add), OperationStep(1, State.CONNECTING, 1.0)]
    assert history(*steps).engines() == []  # it is being checked
    steps.append(OperationStep(1, State.HEALTH_CHECKING, 1.0, plan=PLAN))
    assert [o.id for o in history(*steps).engines()] == [1]
    remove = OperationRequest("remove_engine", engine=1)
    steps += [OperationStep(4, State.PENDING, 2.0, remove)]
    steps += [OperationStep(4, state, 3.0, plan=PLAN) for state in IN[1:]]
    assert [o.id for o in history(*steps[:-3]).engines()] == [1]
    assert history(*steps[:-2]).engines() == []
    assert history(*steps).engines() == []


def test_a_secret_of_the_request_is_not_shown() -> None:
    request = OperationRequest("add_engine", url="http://host", key_file="a-secret-name", key="idempotent")
    shown = str(history(OperationStep(1, State.PENDING, 0.0, request)).operations[1].shown())
    assert "a-secret-name" not in shown
    assert "http://host" in shown
