"""Rows that a client keeps with a role's credentials, on a real server: taken back, and left alone if actors work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from broker.connection import Connection
from broker.leases import RunState
from broker.permissions import NODE, OPERATOR
from broker.store import Store
from broker.streams import open_bucket
from broker.subjects import RowId, Subjects
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.messages import Weights
from relax_actors.roles import make_role
from relax_actors.supervision.kept_rows import Nodes, nodes_of, patience_of
from relax_actors.supervision.lost_rows import LostRows
from tests.support.fuzzing import samples
from tests.support.guarded import Guarded, MakeGuarded
from tests.support.pool_clients import DELAY_FOR_GOOD, PoolClient, pool_client
from tests.support.running import TINY

RUN = "kept"
SUBJECTS = Subjects(RUN)
SETTINGS = [f"run.name={RUN}", "supervision.ack_wait=60"]
CONFIG = load_config(TINY, SETTINGS)
ROWS = [RowId(0, index) for index in range(4)]
LIMITS = patience_of(CONFIG, "rollout", make_role(CONFIG, "rollout"))
PATIENCE = LIMITS.first
EXTENSION = b"+WPI"
MISSING_SECONDS = 2.0
"""Time without a delivery that is taken for none at all."""


def state_of(connection: Connection) -> RunState:
    return RunState(connection, connection.call(open_bucket(connection, SUBJECTS), 20))


@dataclass
class Watched:
    """A run whose root looks for kept and lost rows, with a clock of its own."""

    table: Table
    node: Connection
    now: float = 0.0
    seen: list[tuple[str, str]] = field(default_factory=list)
    search: LostRows = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def report(self, kind: str, **fields: Any) -> None:
        self.seen.append((kind, fields["row"]))

    def restart(self) -> None:
        """Begin as a root does that replaces a dead one."""
        nodes = nodes_of(self.table, state_of(self.table.connection))
        self.search = LostRows(self.table, CONFIG, nodes, self.report, lambda: self.now)

    def actors(self, phase: str = "ready", *, works: bool = False, n: int = 0, restarts: int = 0) -> None:
        """Publish what a node sees of its rollout."""
        child = {"phase": phase, "since": time.time(), "restarts": restarts, "pid": 1, "works": works}
        lease = {
            "name": f"node{n}",
            "where": "here",
            "since": 1.0,
            "pid": 1,
            "children": {f"rollout.{n}": child},
        }
        self.node.call(state_of(self.node).renew_lease("node", n, lease, 60), 10)

    def lose_node(self, n: int) -> None:
        """Let the lease of a node end."""
        self.node.call(state_of(self.node).release_lease("node", n), 10)

    def unacknowledged(self) -> int:
        """Return how many messages the role has not acknowledged."""
        work = self.table.connection.js.consumer_info(SUBJECTS.table_stream, "rollout")
        pending = self.table.connection.call(work, 10).num_ack_pending
        assert pending is not None
        return pending

    def wait(self, seconds: float, step: float = 4.0) -> list[tuple[str, str]]:
        """Let time pass, with a look every few seconds; return the events."""
        known, end = len(self.seen), self.now + seconds
        while self.now < end:
            self.search.check_when_due()
            self.now += step
        self.search.check_when_due()
        return self.seen[known:]


@pytest.fixture
def guarded(make_guarded: MakeGuarded) -> Guarded:
    found = make_guarded(SETTINGS)
    found.start_run()
    return found


@pytest.fixture
def watched(guarded: Guarded, tmp_path: Path) -> Iterator[Watched]:
    """A run that has published weights 0 and admitted step 0, whose one rollout is idle."""
    with (
        closing(Connection(guarded.address(OPERATOR), OPERATOR)) as operator,
        closing(Connection(guarded.address(NODE), NODE)) as node,
    ):
        table = Table(operator, SUBJECTS, Store(tmp_path / "store"), "test.0#1")
        table.put(SUBJECTS.numbered("weights", 0), Weights(0, "f" * 32, [], 1))
        table.put_all((SUBJECTS.cell(row, "prompt"), samples()["prompt"]) for row in ROWS)
        watched = Watched(table, node)
        watched.actors()
        yield watched


def answer(watched: Watched, client: PoolClient, rows: dict[str, Msg]) -> None:
    """Do what an actor does with rows that it was given."""
    for name, message in rows.items():
        row, _, _ = name.rpartition(".")
        watched.table.put(f"{SUBJECTS.prefix}.{row}.trajectory", samples()["trajectory"])
        client.acknowledge(message)


def keep(client: PoolClient, rows: dict[str, Msg], how: bytes) -> None:
    for message in rows.values():
        client.answer(message, how)


@pytest.mark.parametrize("how", [DELAY_FOR_GOOD, EXTENSION])
def test_rows_that_a_client_keeps_are_delivered_again_and_then_quarantined(
    watched: Watched, guarded: Guarded, how: bytes
) -> None:
    with pool_client(guarded, SUBJECTS, "rollout") as thief:
        taken = thief.take(4)
        kept = {name: taken[name] for name in sorted(taken)[:2]}
        keep(thief, kept, how)
        answer(watched, thief, {name: taken[name] for name in sorted(taken)[2:]})
        first, second = (str(row) for row in ROWS[:2])
        assert watched.wait(PATIENCE + 8) == [
            ("row_kept", first), ("row_kept", second), ("row_lost", first), ("row_lost", second)
        ]  # fmt: skip
        keep(thief, kept, how)  # of what it no longer has
        again = thief.take(2)
        assert sorted(again) == [f"{first}.redeliver-rollout", f"{second}.redeliver-rollout"]
        keep(thief, {name: again[name] for name in sorted(again)[:1]}, how)
        answer(watched, thief, {name: again[name] for name in sorted(again)[1:]})
        assert watched.wait(LIMITS.again - 8) == []
        assert watched.wait(16) == [("row_kept", first), ("row_quarantined", first)]
    assert watched.wait(2 * PATIENCE) == []


def test_rows_of_an_actor_that_works_for_long_are_left_alone(watched: Watched, guarded: Guarded) -> None:
    """Another actor of the role is idle, on another node, and the run makes no step for an hour."""
    watched.actors(works=True)
    watched.actors(n=1)
    with pool_client(guarded, SUBJECTS, "rollout") as slow:
        taken = slow.take(4)
        keep(slow, taken, EXTENSION)
        assert watched.wait(600) == []
        answer(watched, slow, taken)
    watched.actors()
    assert watched.wait(3 * PATIENCE) == []


def test_an_actor_may_handle_rows_between_two_times_in_which_all_are_idle(watched: Watched, guarded: Guarded) -> None:
    with pool_client(guarded, SUBJECTS, "rollout") as thief:
        keep(thief, thief.take(4), DELAY_FOR_GOOD)
        assert watched.wait(PATIENCE - 5) == []
        watched.actors(works=True)
        assert watched.wait(4) == []
        watched.actors()
        assert watched.wait(PATIENCE - 5) == []
        assert len(watched.wait(10)) == 8


def test_time_in_which_the_root_saw_nothing_does_not_count(watched: Watched, guarded: Guarded) -> None:
    with pool_client(guarded, SUBJECTS, "rollout") as thief:
        keep(thief, thief.take(4), DELAY_FOR_GOOD)
        watched.wait(4)
        watched.now += 10 * PATIENCE
        assert watched.wait(4) == []
        assert len(watched.wait(PATIENCE)) == 8


@pytest.mark.parametrize("phase", ["starting", "backing_off"])
def test_without_a_ready_actor_nothing_is_taken_back(watched: Watched, guarded: Guarded, phase: str) -> None:
    """Rows of a dead pool wait at the server for their redelivery."""
    with pool_client(guarded, SUBJECTS, "rollout") as dead:
        dead.take(4)
    watched.actors(phase)
    assert watched.wait(3 * PATIENCE) == []


def test_what_was_delivered_while_all_were_idle_is_not_taken_back_at_once(watched: Watched, guarded: Guarded) -> None:
    """A row that comes late may just be on its way to an actor."""
    with pool_client(guarded, SUBJECTS, "rollout") as late:
        assert watched.wait(PATIENCE - 5) == []
        late.take(4)
        assert watched.wait(8) == []
        assert len(watched.wait(PATIENCE)) == 8


def test_an_early_row_that_is_kept_hides_no_later_loss(watched: Watched, guarded: Guarded) -> None:
    with pool_client(guarded, SUBJECTS, "rollout") as thief:
        taken = thief.take(4)
        early, *later = sorted(taken)
        keep(thief, {early: taken[early]}, DELAY_FOR_GOOD)
        thief.acknowledge(*(taken[name] for name in later))
        kept = str(ROWS[0])
        lost = [("row_lost", str(row)) for row in ROWS]
        assert watched.wait(PATIENCE + 8) == [("row_kept", kept), *lost]


def test_a_kept_row_that_was_removed_hides_no_later_loss(watched: Watched, guarded: Guarded) -> None:
    with pool_client(guarded, SUBJECTS, "rollout") as thief:
        taken = thief.take(4)
        early, *later = sorted(taken)
        keep(thief, {early: taken[early]}, DELAY_FOR_GOOD)
        thief.acknowledge(*(taken[name] for name in later))
    watched.table.purge([f"{SUBJECTS.prefix}.{ROWS[0]}.>"])
    assert watched.unacknowledged() == 1
    assert watched.wait(PATIENCE + 8) == [("row_lost", str(row)) for row in ROWS[1:]]
    assert watched.unacknowledged() == 0


def test_each_row_is_reported_before_the_next_one_is_taken_back(
    watched: Watched, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []

    def report(kind: str, **_: Any) -> None:
        if kind == "row_kept":
            left.append(watched.unacknowledged())

    monkeypatch.setattr(watched, "report", report)
    watched.restart()
    with pool_client(guarded, SUBJECTS, "rollout") as thief:
        keep(thief, thief.take(4), DELAY_FOR_GOOD)
        watched.wait(PATIENCE + 8)
    assert left == [3, 2, 1, 0]


def test_the_idle_time_begins_anew_with_the_restart_of_an_actor(watched: Watched, guarded: Guarded) -> None:
    """What the dead one held waits for its redelivery."""
    with pool_client(guarded, SUBJECTS, "rollout") as thief:
        keep(thief, thief.take(4), DELAY_FOR_GOOD)
        assert watched.wait(PATIENCE - 5) == []
        watched.actors(restarts=1)
        assert watched.wait(PATIENCE - 5) == []
        assert len(watched.wait(12)) == 8


def test_actors_of_a_vanished_node_may_finish_their_rows(watched: Watched, guarded: Guarded) -> None:
    watched.actors(works=True, n=1)
    with pool_client(guarded, SUBJECTS, "rollout") as slow:
        keep(slow, slow.take(4), EXTENSION)
        assert watched.wait(8) == []
        watched.lose_node(1)
        assert watched.wait(LIMITS.drain + PATIENCE - 8) == []
        assert len(watched.wait(20)) == 8


def test_the_actors_of_a_node_that_was_restarted_are_not_waited_for(watched: Watched, guarded: Guarded) -> None:
    with pool_client(guarded, SUBJECTS, "rollout") as thief:
        keep(thief, thief.take(4), DELAY_FOR_GOOD)
        assert watched.wait(8) == []
        watched.lose_node(0)
        assert watched.wait(8) == []
        watched.actors(restarts=1)
        assert watched.wait(PATIENCE - 5) == []
        assert len(watched.wait(13)) == 8


def test_lost_rows_are_found_although_nothing_is_known_of_the_actors(watched: Watched, guarded: Guarded) -> None:
    class UnreadableError(Exception):
        pass

    def nodes() -> Nodes:
        raise UnreadableError

    search = LostRows(watched.table, CONFIG, nodes, watched.report, lambda: watched.now)
    with suppress(UnreadableError):
        search.check_when_due()
    with pool_client(guarded, SUBJECTS, "rollout") as thief:
        thief.acknowledge(*thief.take(4).values())
    watched.now += CONFIG.supervision.ack_wait
    with pytest.raises(UnreadableError):
        search.check_when_due()
    assert watched.seen == [("row_lost", str(row)) for row in ROWS]


@pytest.mark.parametrize("fatal", ["row_kept", "row_lost"])
def test_a_root_that_is_killed_while_it_takes_rows_back_leaves_nothing_undone(
    watched: Watched, guarded: Guarded, monkeypatch: pytest.MonkeyPatch, fatal: str
) -> None:
    class KilledError(Exception):
        pass

    def report(kind: str, **fields: Any) -> None:
        Watched.report(watched, kind, **fields)
        if kind == fatal:
            raise KilledError

    with pool_client(guarded, SUBJECTS, "rollout") as thief:
        keep(thief, thief.take(4), DELAY_FOR_GOOD)
        with monkeypatch.context() as patch:
            patch.setattr(watched, "report", report)
            watched.restart()
            with pytest.raises(KilledError):
                watched.wait(2 * PATIENCE)
        watched.restart()
        watched.wait(PATIENCE + 8)
        assert {row for kind, row in watched.seen if kind == "row_lost"} == {str(row) for row in ROWS}
        assert sorted(thief.take(5, MISSING_SECONDS)) == [f"{row}.redeliver-rollout" for row in ROWS]
        assert "row_quarantined" not in {kind for kind, _ in watched.seen}


def test_credentials_of_a_role_do_not_forge_that_its_actors_work(watched: Watched, guarded: Guarded) -> None:
    """A lease of an actor, which they may write, is not asked; that of a node they may not write."""
    lease = {"pid": 1, "incarnation": 1, "since": 0.0, "rows": [str(ROWS[0])], "waits_for": None, "doing_since": None}
    with pool_client(guarded, SUBJECTS, "rollout") as thief:
        keep(thief, thief.take(4), DELAY_FOR_GOOD)
        thief.connection.call(state_of(thief.connection).renew_lease("rollout", 0, lease, 60), 10)
        watched.wait(PATIENCE + 8)
        assert {row for kind, row in watched.seen if kind == "row_kept"} == {str(row) for row in ROWS}
