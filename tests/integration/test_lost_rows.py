"""Rows that a role acknowledges without writing its column, on a real server: delivered again, then quarantined."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from broker.connection import Connection
from broker.leases import RunState
from broker.permissions import OPERATOR
from broker.store import Store
from broker.streams import open_bucket
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.messages import Batch, Weights
from relax_actors.runtime import Role, Row
from relax_actors.runtime.join import Join
from relax_actors.supervision.lost_rows import LostRows, lost_rows_of
from relax_actors.supervision.root_status import RootStatusPublisher
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.contexts import context_of
from tests.support.faults import log_of
from tests.support.fuzzing import samples
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.pool_clients import PoolClient, pool_client
from tests.support.running import TINY, wait_until

RUN = "lost"
SUBJECTS = Subjects(RUN)
SETTINGS = [f"run.name={RUN}", "staleness.max=1", "supervision.ack_wait=60"]
CONFIG = load_config(TINY, SETTINGS)
ROWS = [RowId(step, index) for step in (0, 1) for index in range(4)]


@pytest.fixture
def guarded(make_guarded: MakeGuarded) -> Guarded:
    found = make_guarded(SETTINGS)
    found.start_run()
    return found


@pytest.fixture
def table(guarded: Guarded, tmp_path: Path) -> Iterator[Table]:
    """The table of a run that has published weights 0 and admitted steps 0 and 1, as its operator."""
    with closing(Connection(guarded.address(OPERATOR), "operator")) as operator:
        table = Table(operator, SUBJECTS, Store(tmp_path / "store"), "test.0#1")
        table.put(SUBJECTS.numbered("weights", 0), Weights(0, "f" * 32, [], 1))
        table.put_all((SUBJECTS.cell(row, "prompt"), samples()["prompt"]) for row in ROWS)
        yield table


def consumer(guarded: Guarded, role: str) -> AbstractContextManager[PoolClient]:
    return pool_client(guarded, SUBJECTS, role)


class Events:
    """Collects the kind and the row of each event."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        self.seen.append((kind, fields["row"]))


def lost_rows_in(table: Table, report: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> LostRows:
    """Look for lost rows in a run without nodes."""
    return LostRows(table, CONFIG, dict, report, clock)


def redelivered(table: Table, role: str = "rollout") -> list[str]:
    return sorted(str(cell.row) for cell in table.list_cells(f"{SUBJECTS.prefix}.*.*.*.redeliver-{role}"))


def test_lost_rows_are_delivered_again_and_slow_ones_are_not(table: Table, guarded: Guarded) -> None:
    events = Events()
    lost_rows = lost_rows_in(table, events)
    lost_rows.check()
    with consumer(guarded, "rollout") as rollout:
        taken = rollout.take(5)
        lost_rows.check()
        assert events.seen == []
        lost = sorted(taken)[:2]
        rollout.acknowledge(*(taken[name] for name in lost))
        for _ in range(2):  # finds nothing new
            lost_rows.check()
        names = [name.removesuffix(".prompt") for name in lost]
        assert events.seen == [("row_lost", name) for name in names]
        assert redelivered(table) == names
        # The other six prompts are being handled, or wait; then come the two rows, once each.
        rest = rollout.take_all(5)
        assert {name for name in rest if "redeliver" in name} == {f"{name}.redeliver-rollout" for name in names}
        rows = {row for name in (*rest, *sorted(taken)[2:]) for row in [name.rpartition(".")[0]]}
        assert rows == {str(row) for row in ROWS}


def test_a_row_that_is_lost_again_is_quarantined(table: Table, guarded: Guarded) -> None:
    events = Events()
    lost_rows = lost_rows_in(table, events)
    row = RowId(0, 2)
    with consumer(guarded, "rollout") as rollout:
        for name, message in rollout.take(8).items():
            if name != f"{row}.prompt":
                table.put(f"{SUBJECTS.prefix}.{name.removesuffix('prompt')}trajectory", samples()["trajectory"])
            rollout.acknowledge(message)
        lost_rows.check()
        again = rollout.take(1)
        assert list(again) == [f"{row}.redeliver-rollout"]
        lost_rows.check()
        assert [kind for kind, _ in events.seen] == ["row_lost"]
        rollout.acknowledge(*again.values())
        for _ in range(2):
            lost_rows.check()
    assert events.seen == [("row_lost", str(row)), ("row_quarantined", str(row))]
    cell = table.get(SUBJECTS.cell(row, "quarantined"))
    assert cell is not None
    fields = table.read_envelope(cell.data).fields
    assert (fields["role"], fields["deliveries"]) == ("rollout", 2)
    assert "took it twice" in fields["error"]


class KilledError(Exception):
    """The root was killed."""


@pytest.mark.parametrize("fatal", ["event", "consumer", "cell"])
def test_a_root_killed_in_the_middle_leaves_nothing_undone(
    table: Table, guarded: Guarded, monkeypatch: pytest.MonkeyPatch, fatal: str
) -> None:
    """Each successor begins as `relax up` does, which must not undo what is half done."""

    def dying(function: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if after:
                function(*arguments, **more)
            raise KilledError

        return call

    events = Events()
    first = lost_rows_in(table, dying(events, after=False) if fatal == "event" else events)
    with consumer(guarded, "rollout") as rollout:
        rollout.acknowledge(*rollout.take(8).values())
        with monkeypatch.context() as patch:
            if fatal != "event":
                patch.setattr(table, "put", dying(table.put, after=fatal == "cell"))
            with pytest.raises(KilledError):
                first.check()
        table.connection.call(ensure_run_streams(table.connection, CONFIG), 60)
        lost_rows_in(table, events).check()
        assert redelivered(table) == [str(row) for row in ROWS]
        table.connection.call(ensure_run_streams(table.connection, CONFIG), 60)
        lost_rows_in(table, events).check()
        assert sorted(rollout.take_all(8)) == [f"{row}.redeliver-rollout" for row in ROWS]
        assert "row_quarantined" not in {kind for kind, _ in events.seen}


class Scores(Role):
    """Stands for a role whose first delivery was acknowledged without a result."""

    reads = ("prompt", "trajectory")
    writes = "reward"

    def handle(self, row: Row) -> int:
        return len(row.prompt.tokens)


def test_a_redelivery_is_joined_like_an_input_and_a_late_result_is_kept(
    table: Table, guarded: Guarded, tmp_path: Path
) -> None:
    """A column that a slow actor writes before the redelivery is a result; it is no reason to quarantine the row."""
    slow, lost = ROWS[:2]
    table.put_all((SUBJECTS.cell(row, "trajectory"), samples()["trajectory"]) for row in (slow, lost))
    role = Scores()
    with consumer(guarded, "reward") as reward:
        own = Table(reward.connection, SUBJECTS, table.store, "reward.0#1")
        role.context = context_of(own, tmp_path, "reward", tuple(SETTINGS), 1)
        reward.acknowledge(*reward.take(2).values())
        lost_rows_in(table, Events()).check()
        table.put(SUBJECTS.cell(slow, "reward"), samples()["reward"])
        again = reward.take(2)
        assert sorted(again) == [f"{slow}.redeliver-reward", f"{lost}.redeliver-reward"]
        join = Join(role, role.context)
        jobs = {name: reward.connection.call(join.join(message), 20) for name, message in again.items()}
    assert jobs[f"{slow}.redeliver-reward"] is None
    job = jobs[f"{lost}.redeliver-reward"]
    assert job is not None
    assert sorted(job.cells) == ["prompt", "trajectory"]
    trajectory = table.get(SUBJECTS.cell(lost, "trajectory"))
    assert trajectory is not None
    assert job.stored_at == trajectory.sequence
    assert table.list_cells(f"{SUBJECTS.prefix}.*.*.*.quarantined") == []


def test_the_root_looks_for_lost_rows_while_it_publishes_its_status(table: Table, guarded: Guarded) -> None:
    with consumer(guarded, "rollout") as rollout:
        rollout.acknowledge(*rollout.take(8).values())
    config = load_config(TINY, [*SETTINGS, f"run.folder={table.store.root}"])
    repair = partial(lost_rows_of, lambda: config)
    root = RootStatusPublisher(guarded.address(OPERATOR), config, dict, tasks={repair: 0.1})
    root.start()
    try:
        wait_until(lambda: redelivered(table) == [str(row) for row in ROWS], "all rows delivered again", 30)
        events = wait_until(lambda: log_of(table, "event.root.0.row_lost"), "events")
        assert {event["by"] for event in events} == {"rollout"}
    finally:
        root.close()
        root.join(20)


def test_an_error_of_the_search_for_lost_rows_does_not_end_the_status_of_the_root(
    table: Table, guarded: Guarded, tmp_path: Path
) -> None:
    calls = []

    def repair() -> None:
        calls.append(1)
        raise ZeroDivisionError

    config = load_config(TINY, [*SETTINGS, f"run.folder={tmp_path}"])
    root = RootStatusPublisher(guarded.address(OPERATOR), config, dict, tasks={lambda *_: repair: 0.1})
    root.start()
    try:
        event = wait_until(lambda: log_of(table, "event.root.0.repair_failed"), "event")[0]
        assert "ZeroDivisionError" in event["error"]
        assert "in repair" in event["traceback"]
        known = len(calls)
        wait_until(lambda: len(calls) > known, "another search")
        assert root.is_alive()
    finally:
        root.close()
        root.join(20)


def test_a_search_that_does_not_end_holds_up_neither_leases_nor_events_of_the_root(
    table: Table, guarded: Guarded, tmp_path: Path
) -> None:
    began, end = threading.Event(), threading.Event()

    def repair() -> None:
        began.set()
        end.wait(60)

    config = load_config(TINY, [*SETTINGS, f"run.folder={tmp_path}"])
    root = RootStatusPublisher(guarded.address(OPERATOR), config, dict, tasks={lambda *_: repair: 0.1})
    root.start()
    try:
        assert began.wait(20)
        root.event("down", "broker", reason="a test")
        wait_until(lambda: log_of(table, "event.broker.0.down"), "event")
        state = RunState(table.connection, table.connection.call(open_bucket(table.connection, SUBJECTS), 20))
        table.connection.call(state.release_lease("root", 0), 10)
        wait_until(lambda: table.connection.call(state.lease("root", 0), 10), "lease")
    finally:
        end.set()
        root.close()
        root.join(20)


def test_rows_of_a_step_that_is_trained_are_not_needed(table: Table, guarded: Guarded) -> None:
    table.put(SUBJECTS.numbered("batch", 0), Batch([0, 1, 2, 3], 5, 1, 0.5, 0, 20, 1e9))
    events = Events()
    with consumer(guarded, "rollout") as rollout:
        rollout.acknowledge(*rollout.take(8).values())
    lost_rows_in(table, events).check()
    assert redelivered(table) == [str(row) for row in ROWS if row.step == 1]


def test_a_run_is_checked_after_each_ack_wait_without_progress(table: Table, guarded: Guarded) -> None:
    now, events = 0.0, Events()
    lost_rows = lost_rows_in(table, events, clock=lambda: now)
    lost_rows.check_when_due()
    with consumer(guarded, "rollout") as rollout:
        rollout.acknowledge(*rollout.take(8).values())
    now = 59.0
    lost_rows.check_when_due()
    assert events.seen == []
    table.put(SUBJECTS.numbered("weights", 1), Weights(1, "f" * 32, [], 1))
    now = 60.0
    lost_rows.check_when_due()
    now = 119.0
    lost_rows.check_when_due()
    assert events.seen == []
    now = 120.0
    lost_rows.check_when_due()
    assert events.seen == [("row_lost", str(row)) for row in ROWS if row.step == 1]
