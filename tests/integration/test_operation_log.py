"""The log of operations in a table of a real server: requests, conflicts, cancellation and concurrent writers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from broker.table import Table
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OPERATION, OperationRequest
from relax_actors.operations import ConflictError, OperationLog, State
from relax_actors.operations.states import IN, OUT

SCALE = OperationRequest("scale", "rollout", target=3, key="one", author="test")


def test_a_request_is_recorded_and_read_by_others(table: Table) -> None:
    operation = OperationLog(table).request(SCALE)
    assert operation.state is State.PENDING
    other = OperationLog(table)
    assert other.read().operations == {operation.id: operation}
    assert OperationLog(table).advance(operation.id, State.CREATING) is not None
    assert other.read().operations[operation.id].state is State.CREATING


def test_the_same_key_gives_the_same_operation_and_refuses_another_request(table: Table) -> None:
    log = OperationLog(table)
    first = log.request(SCALE)
    assert OperationLog(table).request(SCALE) == first
    with pytest.raises(ConflictError, match=r"key 'one'.*operation 1.*new key"):
        log.request(OperationRequest("scale", "rollout", target=4, key="one", author="test"))


def test_two_operations_on_one_role_do_not_run_at_the_same_time(table: Table) -> None:
    log = OperationLog(table)
    log.request(SCALE)
    with pytest.raises(ConflictError, match=r"operation 1.*rollout.*PENDING"):
        log.request(OperationRequest("scale", "rollout", delta=1))
    assert log.request(OperationRequest("scale", "reward", delta=1)).id == 2


def test_of_many_clients_that_ask_at_once_one_wins(table: Table) -> None:
    def request(n: int) -> str:
        try:
            return str(OperationLog(table).request(OperationRequest("scale", "rollout", target=n + 1)).id)
        except ConflictError:
            return ""

    with ThreadPoolExecutor(8) as pool:
        won = [text for text in pool.map(request, range(8)) if text]
    assert len(won) == 1
    assert len(OperationLog(table).read().operations) == 1


def test_many_clients_with_one_key_get_one_operation(table: Table) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: OperationLog(table).request(SCALE).id, range(8)))
    assert set(found) == {found[0]}


def test_an_operation_is_either_cancelled_or_continued(table: Table) -> None:
    for n in range(5):
        number = OperationLog(table).request(OperationRequest("scale", f"role{n}", delta=1)).id
        for state in (State.CREATING, State.CONNECTING):
            OperationLog(table).advance(number, state)

        def cancel(number: int = number) -> bool:
            try:
                return OperationLog(table).cancel(number, "test").state is State.CANCELLED
            except ConflictError:
                return False

        def go_on(number: int = number) -> bool:
            return OperationLog(table).advance(number, State.HEALTH_CHECKING) is not None

        works: list[Callable[[], bool]] = [cancel, go_on]
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda work: work(), works))
        assert sorted(results) == [False, True]


def test_cancelling_again_is_no_error_and_an_unknown_operation_is(table: Table) -> None:
    log = OperationLog(table)
    number = log.request(SCALE).id
    assert log.cancel(number, "enough").reason == "enough"
    assert log.cancel(number, "again").reason == "enough"
    with pytest.raises(ConfigError, match="no operation 99"):
        log.cancel(99, "")


@pytest.mark.parametrize("path", [OUT, IN])
def test_cancelling_what_is_done_is_refused_and_changes_nothing(table: Table, path: tuple[State, ...]) -> None:
    log = OperationLog(table)
    number = log.request(SCALE).id
    for state in path[1:]:
        log.advance(number, state)
    with pytest.raises(ConflictError, match=f"operation {number} is {path[-1]}.*PENDING.*can be cancelled"):
        log.cancel(number, "too late")
    operation = log.read().operations[number]
    assert (operation.state, operation.reason) == (path[-1], "")


def test_a_malformed_cell_neither_stops_the_log_nor_is_obeyed(table: Table) -> None:
    log = OperationLog(table)
    first = log.request(SCALE).id
    table.call(table.put_async(table.subjects.numbered(OPERATION, 2), b"\x00nonsense"))
    second = log.request(OperationRequest("scale", "reward", delta=1))
    assert (first, second.id) == (1, 3)
    cell = table.get(table.subjects.numbered(OPERATION, 2))
    assert cell is not None
    table.remove([cell])  # as the trainer's collector does
    log.advance(second.id, State.CREATING)
    found = OperationLog(table).read()
    assert found.operations[second.id].state is State.CREATING


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (OperationRequest("scale"), "`target`.*`delta`"),
        (OperationRequest("scale", target=1, delta=1), "`target`.*`delta`"),
        (OperationRequest("explode"), "explode.*scale"),
        (OperationRequest("add_engine", url="host:1"), "http://"),
        (OperationRequest("remove_engine"), "id"),
        (OperationRequest("scale", target=1, seconds=-1), "deadline"),
        (OperationRequest("scale", "r" * 999, target=1), "role.*shorten"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(table: Table, request_: OperationRequest, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OperationLog(table).request(request_)
    assert not OperationLog(table).read().operations
