"""Sessions of agents while the broker is slow or full, agents are lost, and rows are delivered again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.server import Server
from broker.subjects import RowId
from broker.table import Table
from relax_actors.errors import EngineError
from relax_actors.messages.generate import GenerateCall, Refusal, SessionCall
from relax_actors.roles.agent_rollout import AgentRollout
from relax_actors.sessions.call_watch import CallWatch
from tests.support.messages import assert_says
from tests.support.policy_ends import PolicyEnds
from tests.support.running import wait_until
from tests.support.session_ends import ROW, USER, LeftRows, ask, begin, begin_reopening, full, handle, reopen, stopped


@pytest.mark.parametrize("kind", ["end", "keep", "show"])
def test_agent_whose_lease_ends_during_its_request_does_not_get_the_session_of_its_successor(
    make_sessions: Callable[..., Any], server: Server, kind: str
) -> None:
    with make_sessions(1) as (sessions, connection, _):
        lost = handle(connection, sessions, "take", lease=1.0).session
        (session, _) = sessions.book.sessions(ROW)
        with stopped(server):
            call = SessionCall(kind, lost, reward=0.25)
            late = asyncio.run_coroutine_threadsafe(sessions.handle(call), connection.loop)
            wait_until(lambda: session.attempt, "end of the lease")
        refused = late.result(20)
        assert (refused.refusal, refused.session) == (Refusal.ENDED, "")
        assert_says(refused.detail, repr(lost), "never existed")
        assert (session.attempt, session.state) == (1, None), "the sample waits for its next agent"


def test_sample_whose_lease_ends_while_it_is_given_out_is_given_to_one_agent(
    make_sessions: Callable[..., Any], server: Server
) -> None:
    with make_sessions(1) as (sessions, connection, _):
        (session, _) = sessions.book.sessions(ROW)
        with stopped(server):
            late = asyncio.run_coroutine_threadsafe(sessions.handle(SessionCall("take", lease=1.0)), connection.loop)
            wait_until(lambda: session.attempt, "end of the lease")
        given = {late.result(20).session, handle(connection, sessions, "take", lease=60.0).session}
        assert given == {"group-0-0-0-1", "group-0-0-1-0"}
        assert not handle(connection, sessions, "take").session


def test_agent_that_failed_does_not_get_the_session_of_its_successor(make_sessions: Callable[..., Any]) -> None:
    with make_sessions(1) as (sessions, connection, _):
        failed = handle(connection, sessions, "take", lease=60.0).session
        ended = handle(connection, sessions, "end", failed, error="the agent crashed")
        assert (ended.refusal, ended.session, ended.seconds) == ("", failed, 0.0)
        assert handle(connection, sessions, "take", lease=60.0).session == "group-0-0-0-1"


def test_complete_answer_whose_client_left_while_it_was_recorded_is_given_to_the_next_request(
    make_sessions: Callable[..., Any], server: Server
) -> None:
    """However often its clients leave: each tries to get the same answer."""
    with make_sessions(1) as (sessions, connection, prompts):
        name = handle(connection, sessions, "take", lease=60.0).session
        watches: list[CallWatch] = []
        with stopped(server):
            asking = begin(connection, sessions, GenerateCall("one", session=name, messages=[USER]), watches)
            wait_until(lambda: watches and watches[0].is_cancelled, "the answer, which is being recorded")
            connection.loop.call_soon_threadsafe(sessions.on_departure, "one")
        first = asking.result(20)
        (session, _) = sessions.book.sessions(ROW)
        assert session.forest.leaves() == [], "nobody has read it"
        for call in ("two", "three"):
            again = ask(connection, sessions, name, [USER], call=call)
            assert (again.tokens.tolist(), again.call) == (first.tokens.tolist(), "one")
            assert session.forest.leaves() == [0]
            connection.loop.call_soon_threadsafe(sessions.on_departure, call)
            wait_until(lambda: not session.forest.leaves(), "note that the client has left")
        ask(connection, sessions, name, [USER], call="four")
        connection.loop.call_soon_threadsafe(sessions.on_departure, "one")
        connection.loop.call_soon_threadsafe(sessions.on_arrival, "one")
        connection.loop.call_soon_threadsafe(sessions.on_departure, "four")
        other = ask(connection, sessions, name, [USER], call="five")
        assert other.call == "five", "the answer has arrived, so that the agent wants another one"
        assert (len(prompts), session.forest.leaves()) == (2, [0, 1])


def test_answer_that_is_recorded_when_its_session_has_ended_is_not_trained(
    make_sessions: Callable[..., Any], server: Server
) -> None:
    with make_sessions(1, "agent.seconds=3") as (sessions, connection, prompts):
        name = handle(connection, sessions, "take", lease=60.0).session
        first = ask(connection, sessions, name, [USER])
        (session, _) = sessions.book.sessions(ROW)
        watches: list[CallWatch] = []
        said = [USER, {"role": "assistant", "content": "1"}, {"role": "user", "content": "again"}]
        with stopped(server):
            asking = begin(connection, sessions, GenerateCall("late", session=name, messages=said), watches)
            wait_until(lambda: watches and watches[0].is_cancelled, "the answer, which is being recorded")
            wait_until(lambda: session.state, "end of the agent's time")
        late = asking.result(20)
        assert (late.refusal, late.detail) == (
            Refusal.ENDED,
            f"session {name!r} is over: it ended with reason 'timeout'",
        )
        assert (len(prompts), len(session.forest.turns)) == (2, 2)
        before = session.forest.sequences()
    with make_sessions(2) as (sessions, _, _):
        (session, _) = sessions.book.sessions(ROW)
        assert session.state is not None
        assert (session.state.turns, len(session.forest.turns)) == ([0], 2)
        for (sequence,) in (before, session.forest.sequences()):
            assert sequence.token_ids[sequence.loss_mask].tolist() == first.tokens.tolist()


@pytest.mark.parametrize("repeats", [False, True])
def test_end_that_finds_the_broker_full_is_recorded_when_there_is_room(
    make_sessions: Callable[..., Any], table: Table, left: list[RowId], *, repeats: bool
) -> None:
    with make_sessions(1) as (sessions, connection, _):
        one, other = (handle(connection, sessions, "take", lease=60.0).session for _ in range(2))
        handle(connection, sessions, "end", one, reward=0.5)
        with full(table):
            failed = handle(connection, sessions, "end", other, reward=1.0)
            assert failed.refusal == Refusal.FAILED
            assert_says(
                failed.detail,
                "BrokerFullError",
                table.subjects.turn(ROW, 0, 2),
                "maximum bytes",
                "broker.max_bytes",
            )
            assert left == [], "the row ends when the log says so"
        if repeats:
            assert handle(connection, sessions, "end", other, reward=1.0).session == other
        wait_until(lambda: left, "end of the row")
    with make_sessions(2) as (sessions, _, _):
        assert [session.state.reward for session in sessions.book.sessions(ROW)] == [0.5, 1.0]


def test_agent_whose_answer_cannot_be_recorded_may_ask_again(make_sessions: Callable[..., Any], table: Table) -> None:
    with make_sessions(1) as (sessions, connection, _):
        name = handle(connection, sessions, "take", lease=60.0).session
        with full(table):
            failed = ask(connection, sessions, name, [USER])
        assert failed.refusal == Refusal.FAILED, "not the fault of the request"
        assert_says(
            failed.detail, "BrokerFullError", table.subjects.turn(ROW, 0, 1), "maximum bytes", "broker.max_bytes"
        )
        assert not ask(connection, sessions, name, [USER], is_retry=True).refusal


def test_error_of_one_row_does_not_keep_others_from_the_record(
    make_sessions: Callable[..., Any], left: LeftRows
) -> None:
    with make_sessions(1, "agent.retries=0") as (sessions, connection, _):
        left.error = OSError("bug")
        for _ in range(2):
            handle(connection, sessions, "take", lease=1.0)
        wait_until(lambda: left.error is None, "error of the end of the row")
        reopen(connection, sessions, RowId(0, 1))
        for _ in range(2):
            handle(connection, sessions, "take", lease=1.0)
        wait_until(lambda: RowId(0, 1) in left, "end of the other row")


def test_request_of_before_a_redelivery_of_its_row_adds_nothing_to_the_row(
    make_sessions: Callable[..., Any], goes_on: threading.Event, left: LeftRows
) -> None:
    with make_sessions(1) as (sessions, connection, _):
        name = handle(connection, sessions, "take", lease=60.0).session
        goes_on.clear()
        asking = begin(connection, sessions, GenerateCall("one", session=name, messages=[USER]))
        wait_until(sessions.book.sessions(ROW)[0].answering.locked, "the request")
        reopen(connection, sessions)
        goes_on.set()
        first = asking.result(20)
        assert (first.refusal, first.detail) == (Refusal.ELSEWHERE, "group.0.0 was released; send the request again")
        assert left == [], "this actor has the row still"
        again = ask(connection, sessions, name, [USER], call="one")
        (session, _) = sessions.book.sessions(ROW)
        assert [turn.tokens.tolist() for turn in session.forest.turns] == [again.tokens.tolist()]
    with make_sessions(2) as (sessions, _, _):
        (session, _) = sessions.book.sessions(ROW)
        assert [turn.tokens.tolist() for turn in session.forest.turns] == [again.tokens.tolist()]


def test_row_that_is_delivered_again_while_a_turn_is_recorded_has_the_turn(
    make_sessions: Callable[..., Any], server: Server, left: LeftRows
) -> None:
    with make_sessions(1) as (sessions, connection, _):
        name = handle(connection, sessions, "take", lease=60.0).session
        watches: list[CallWatch] = []
        with stopped(server):
            asking = begin(connection, sessions, GenerateCall("one", session=name, messages=[USER]), watches)
            wait_until(lambda: watches and watches[0].is_cancelled, "the answer, which is being recorded")
            opening = begin_reopening(connection, sessions)
        first = asking.result(20)
        opening.result(20)
        again = ask(connection, sessions, name, [USER], call="one")
        assert (again.tokens.tolist(), left) == (first.tokens.tolist(), [])
        (session, _) = sessions.book.sessions(ROW)
        assert [turn.call for turn in session.forest.turns] == ["one"]


def test_actor_writes_nothing_to_a_row_that_was_removed(
    make_sessions: Callable[..., Any], table: Table, left: LeftRows
) -> None:
    with make_sessions(1) as (sessions, connection, _):
        name = handle(connection, sessions, "take", lease=60.0).session
        ask(connection, sessions, name, [USER])
        with make_sessions(2):
            pass  # took the row over, and ended it
        cells = table.subjects.turn(ROW, 0, "*")
        table.purge([cells])
        refused = ask(connection, sessions, name, [USER, USER])
        gone = "the log of group.0.0 was removed, because the row has ended; take another sample"
        assert (refused.refusal, refused.detail, left) == (Refusal.ELSEWHERE, gone, [ROW])
        assert table.call(table.list_subjects_async(cells)) == []
    with make_sessions(3) as (sessions, connection, _):
        name = handle(connection, sessions, "take", lease=60.0).session
        table.purge([cells])
        kept = handle(connection, sessions, "keep", name)
        assert (kept.refusal, kept.detail) == (Refusal.ELSEWHERE, gone)


class FailingRollout(AgentRollout):
    """A rollout whose engine fails once.

    Attributes:
        fails: whether it fails at the next token.
    """

    fails = False

    def progress(self) -> None:
        """Fail, or report progress."""
        if self.fails:
            self.fails = False
            msg = "out of memory"
            raise EngineError(msg)
        super().progress()


def test_rows_whose_generation_fails_are_released_and_offered_again(table: Table, tmp_path: Path) -> None:
    ends = PolicyEnds(table, tmp_path, FailingRollout, "agent.idle_seconds=1", "rollout.max_concurrent_prompts=2")
    role = ends.role
    assert isinstance(role, FailingRollout)
    rows = [ends.row(0), ends.row(1)]
    held = role.stream(rows, lambda _: ())
    next(held)
    next(held)
    assert role.metrics()["sessions_waiting"] == 2
    role.fails = True
    with pytest.raises(EngineError, match=r"^out of memory$"):
        for _ in held:
            pass
    counts = {name: value for name, value in role.metrics().items() if name.startswith("sessions_")}
    assert counts == {"sessions_waiting": 0, "sessions_running": 0, "sessions_ended": 0}
    assert not ends.session("take").session, "an agent would work for nothing"
    ends.start(*rows)
    for _ in rows:
        name = ends.take()
        ends.ask(name, f"call of {name}", max_tokens=2)
        ends.session("end", name, reward=1.0)
    ends.join()
    assert set(ends.results) == {row.id for row in rows}
    ends.close()
