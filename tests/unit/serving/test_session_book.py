"""Sessions of a rollout actor: given out once, given out again when lost, and none leaks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from broker.subjects import RowId
from relax_actors.messages import FinishReason
from relax_actors.messages.generate import SessionCall
from relax_actors.messages.session_log import SessionLog, SessionState, SessionTurn, Turn
from relax_actors.sessions.session_book import Rules, Session, SessionBook
from relax_actors.sessions.session_log import restore
from tests.unit.serving.test_forest import USER, turn

RULES = Rules(seconds=100.0, lease=10.0, retries=1, max_turns=4)
ROW = RowId(3, 1)


def book_of(samples: int = 2, row: RowId = ROW, *, resumed: bool = False) -> SessionBook:
    book = SessionBook(RULES)
    book.open(row, [Session(row, n, {}, 7) for n in range(samples)], 0.0, resumed=resumed)
    return book


def recorded(book: SessionBook) -> list[SessionState]:
    """Return the states that are not recorded, as if they were recorded now."""
    found = []
    for session in book.unrecorded():
        found += session.unrecorded
        session.unrecorded.clear()
    return found


def expired(book: SessionBook, now: float) -> list[SessionState]:
    """Expire sessions and return their new states, as if they were recorded now."""
    book.expire(now)
    return recorded(book)


def test_row_is_over_when_the_ends_of_its_samples_are_recorded() -> None:
    book = book_of(1)
    (session,) = book.sessions(ROW)
    session.end(FinishReason.STOP, SessionCall("end", reward=1.0))
    session.end(FinishReason.ERROR)
    assert not book.is_over(ROW)
    assert [(state.reason, state.reward) for state in recorded(book)] == [("stop", 1.0)], "the first end counts"
    assert book.is_over(ROW)


def test_each_sample_is_given_to_one_agent() -> None:
    book = book_of()
    first, second = book.take(10.0, 0.0), book.take(10.0, 0.0)
    assert first is not None
    assert second is not None
    assert [first.id, second.id] == ["group-3-1-0-0", "group-3-1-1-0"]
    assert book.take(10.0, 0.0) is None
    assert book.find(first.id, 1.0) is first
    assert [book.find(name, 1.0) for name in ("group-3-2-0-0", "group-3-1-0-1", "group-3-1-9-0", "x")] == [
        "elsewhere",
        "ended",
        "ended",
        "ended",
    ]


def test_sample_of_a_lost_agent_is_given_out_again_and_then_ends() -> None:
    book = book_of(1)
    lost = book.take(10.0, 0.0)
    assert lost is not None
    assert book.find(lost.id, 8.0) is lost
    book.expire(17.0)
    assert book.unrecorded() == []
    (state,) = expired(book, 19.0)
    assert (state.attempt, state.reason) == (1, "")
    assert book.find("group-3-1-0-0", 20.0) == "ended", "the lost agent must not go on beside its successor"
    again = book.take(10.0, 20.0)
    assert again is not None
    assert again.id == "group-3-1-0-1"
    (state,) = expired(book, 31.0)
    assert state.reason == FinishReason.ERROR
    assert book.is_over(ROW)


def test_agent_that_takes_too_long_ends_its_sample() -> None:
    book = book_of(1)
    slow = book.take(1000.0, 0.0)
    assert slow is not None
    (state,) = expired(book, 101.0)
    assert state.reason == FinishReason.TIMEOUT
    assert book.find(slow.id, 102.0) is slow, "its agent is told how the session ended"


def test_agents_of_a_row_that_was_taken_over_go_on() -> None:
    book = book_of(2, resumed=True)
    assert book.take(10.0, 1.0) is None, "the agent that has the sample gets the time of a lease to come back"
    assert isinstance(book.find("group-3-1-0-0", 2.0), Session)
    other = book.take(10.0, 11.0)
    assert other is not None
    assert other.sample == 1


def test_log_brings_sessions_back_to_where_they_were() -> None:
    sessions = [Session(ROW, n, {}, 7) for n in range(2)]
    number = turn(sessions[0].forest, [USER], "a")
    cells = [SessionTurn(0, number, sessions[0].forest.turns[number])]
    logs = [SessionLog(cells), SessionLog([], [SessionState(0, 1), SessionState(1, 0, "stop", 0.5)])]
    found = [Session(ROW, n, {}, 7) for n in range(2)]
    restore(found, logs)
    assert (found[0].attempt, found[0].state) == (1, None)
    assert found[0].forest.replayed(cells[0].turn.asked) == [0], "a restarted agent gets the recorded answer"
    assert found[1].state == SessionState(1, 0, "stop", 0.5)
    empty = cells[0].turn.observed
    orphan = SessionTurn(0, 2, Turn(9, empty, empty[:0], empty[:0], empty[:0], asked="x", state="y"))
    restore(found, [SessionLog([orphan])])
    assert len(found[0].forest.turns) == 1


@pytest.mark.parametrize("late_first", [False, True])
def test_turn_recorded_beside_the_end_of_its_sample_is_not_exported(*, late_first: bool) -> None:
    session = Session(ROW, 0, {}, 7)
    turn(session.forest, [USER], "a")
    turn(session.forest, [{"role": "user", "content": "left"}], "b")
    session.forest.departed(1)
    session.end(FinishReason.TIMEOUT)
    end = SessionLog([], session.unrecorded)
    turn(session.forest, [{"role": "user", "content": "late"}], "c")
    first, left, late = (SessionLog([SessionTurn(0, n, one)]) for n, one in enumerate(session.forest.turns))
    found = Session(ROW, 0, {}, 7)
    restore([found], [first, left, late, end] if late_first else [first, left, end, late])
    assert (len(found.forest.turns), found.forest.leaves(), found.state) == (3, [0], session.state)


@pytest.mark.parametrize("by_log", [False, True])
def test_a_refilled_sample_gets_other_answers_if_its_agent_failed_and_the_same_if_it_was_lost(*, by_log: bool) -> None:
    book = SessionBook(replace(RULES, refills=True, retries=2))
    book.open(ROW, [Session(ROW, 0, {}, 7)], 0.0, resumed=False)
    session = book.take(10.0, 0.0)
    assert session is not None
    for text in ("a", "b"):
        turn(session.forest, [USER], text)
    asked = session.forest.turns[0].asked
    logs = [SessionLog([SessionTurn(0, number, one)]) for number, one in enumerate(session.forest.turns)]
    (lost,) = expired(book, 50.0)
    assert (lost.attempt, lost.forgets) == (1, False)
    if not by_log:
        assert session.forest.replayed(asked) == [0]
    book.fail(session, 50.0)
    (failed,) = recorded(book)
    assert (failed.attempt, failed.forgets, failed.reason) == (2, True, "")
    if by_log:
        session = Session(ROW, 0, {}, 7)
        restore([session], [*logs, SessionLog([], [lost]), SessionLog([], [failed])])
    assert session.attempt == 2
    assert (session.forest.replayed(asked), session.forest.used) == ([], 0)
    assert turn(session.forest, [USER], "c") == 2, "its number, and so its seed, is another one"
    book.fail(session, 60.0)
    assert session.state is not None
    assert session.state.reason == FinishReason.ERROR


def test_a_thousand_sessions_half_of_them_abandoned_leave_nothing_behind() -> None:
    book, now, order = SessionBook(RULES), 0.0, random.Random(4)
    rows = [RowId(0, n) for n in range(125)]
    for row in rows:
        book.open(row, [Session(row, n, {}, 7) for n in range(8)], now, resumed=False)
    assert len(book) == 1000
    over: set[RowId] = set()
    while len(over) < len(rows):
        while (session := book.take(10.0, now)) is not None:
            if order.random() < 0.5:
                session.end(FinishReason.STOP, SessionCall("end", reward=1.0))
        now += 11.0
        expired(book, now)
        for row in rows:
            if row not in over and book.is_over(row):
                over.add(row)
                assert len(book.close(row)) == 8
        assert now < 1000.0
    assert len(book) == 0
    assert book.counts() == {"waiting": 0, "running": 0, "ended": 0}
