"""Sessions of agents on the real server: answers are written first, taken over, replayed, and exported as sequences."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from broker.connection import Connection
from broker.server import Server
from broker.table import Table
from relax_actors.errors import RowTakenError
from relax_actors.messages import SessionLog
from relax_actors.messages.generate import GenerateCall, Refusal, SessionCall
from relax_actors.messages.session_log import SessionState
from relax_actors.sessions.agent_sessions import AgentSessions
from relax_actors.sessions.call_watch import CallWatch
from relax_actors.sessions.session_log import LogWriter, take_log
from tests.support.messages import assert_says
from tests.support.running import wait_until
from tests.support.session_ends import ROW, USER, ask, begin, handle, stopped


def test_actor_that_takes_a_row_over_continues_its_conversations(make_sessions: Callable[[int], Any]) -> None:
    with make_sessions(1) as (sessions, connection, prompts):
        name = handle(connection, sessions, "take", lease=30.0).session
        first = ask(connection, sessions, name, [USER])
        more = [USER, {"role": "assistant", "content": "1"}, {"role": "user", "content": "again"}]
        second = ask(connection, sessions, name, more)
        assert second.prompt.tolist() == [*first.prompt, *first.tokens, *prompts[1][len(first.prompt) + 2 :]]
        handle(connection, sessions, "end", handle(connection, sessions, "take").session, reward=0.5)
    with make_sessions(2) as (sessions, connection, prompts):
        same = ask(connection, sessions, name, more, is_retry=True)
        assert (same.tokens.tolist(), same.call, prompts) == (second.tokens.tolist(), second.call, [])
        longer = [*more, {"role": "assistant", "content": "2"}, {"role": "user", "content": "go on"}]
        third = ask(connection, sessions, name, longer)
        assert third.prompt[: len(second.prompt)].tolist() == second.prompt.tolist()
        handle(connection, sessions, "end", name, reward=1.0)
        assert sessions.book.is_over(ROW), "the other sample had ended before"
        one, other = connection.call(sessions.close(ROW), 20)
        (sequence,) = one.forest.sequences()
        assert sequence.spans is not None
        assert (len(sequence.spans), one.state.reward, other.state.reward) == (3, 1.0, 0.5)
        assert sequence.token_ids[sequence.loss_mask].tolist() == [*first.tokens, *second.tokens, *third.tokens]


def test_actor_that_was_taken_for_dead_gives_no_answer_that_its_successor_does_not_know(
    make_sessions: Callable[[int], Any], goes_on: threading.Event
) -> None:
    said, answers = [USER], []

    def turn(actor: tuple[AgentSessions, Connection, list[np.ndarray]], name: str) -> None:
        sessions, connection, prompts = actor
        answers.append(ask(connection, sessions, name, said, call=f"c{len(said)}"))
        said.extend([{"role": "assistant", "content": str(len(prompts))}, {"role": "user", "content": "again"}])

    with make_sessions(1) as stopped:
        zombie, connection, _ = stopped
        name = handle(connection, zombie, "take", lease=60.0).session
        turn(stopped, name)
        goes_on.clear()
        call = GenerateCall("late", session=name, messages=[*said[:-1], {"role": "user", "content": "late"}])
        asking = begin(connection, zombie, call)
        wait_until(zombie.book.sessions(ROW)[0].answering.locked, "the request")
        with make_sessions(2) as successor:
            goes_on.set()
            late = asking.result(20)
            taken = "another actor has taken group.0.0 over; send the request again"
            assert (late.refusal, late.detail) == (Refusal.ELSEWHERE, taken)
            kept = handle(connection, zombie, "keep", name)
            assert (kept.refusal, kept.detail) == (Refusal.ELSEWHERE, "group.0.0 was released; send the request again")
            assert not handle(connection, zombie, "take").session, "it offers no sample any more"
            assert str(connection.call(zombie.close(ROW), 20)) == taken
            turn(successor, name)
            turn(successor, name)
            with make_sessions(3) as third:
                turn(third, name)
                (session, _) = connection.call(third[0].close(ROW), 20)
    (sequence,) = session.forest.sequences()
    assert sequence.token_ids.tolist() == [*answers[-1].prompt, *answers[-1].tokens]
    assert sequence.token_ids[sequence.loss_mask].tolist() == [t for one in answers for t in one.tokens.tolist()]


def test_cell_whose_acknowledgement_is_lost_is_written_once(table: Table) -> None:
    def write(writer: LogWriter, reason: str) -> None:
        table.connection.call(writer.write(SessionLog(states=[SessionState(0, 0, reason)])), 20)

    writer, again, other = (LogWriter(table, ROW, 0) for _ in range(3))
    write(writer, "stop")
    write(again, "stop")  # as a writer repeats a cell that the broker stored before it went down
    with pytest.raises(RowTakenError):
        write(other, "error")
    write(again, "error")
    logs, _ = table.connection.call(take_log(table, ROW), 20)
    assert [state.reason for log in logs for state in log.states] == ["stop", "error"]


def test_turns_behind_one_whose_cell_is_lost_are_left_out(make_sessions: Callable[[int], Any], table: Table) -> None:
    with make_sessions(1) as (sessions, connection, prompts):
        name = handle(connection, sessions, "take", lease=60.0).session
        said: list[dict[str, str]] = [USER]
        for _ in range(3):
            ask(connection, sessions, name, said, call=f"c{len(said)}")
            said += [{"role": "assistant", "content": str(len(prompts))}, {"role": "user", "content": "again"}]
    cell = table.get(table.subjects.turn(ROW, 0, 2))
    assert cell is not None
    table.remove([cell])
    table.put(cell.subject, SessionLog())
    with make_sessions(2) as (sessions, connection, _):
        (session, _) = sessions.book.sessions(ROW)
        assert len(session.forest.turns) == 1
        found = ask(connection, sessions, name, said, call="behind the lost one")
    with make_sessions(3) as (sessions, _, _):
        (session, _) = sessions.book.sessions(ROW)
        assert session.forest.tokens(1).tolist() == [*found.prompt, *found.tokens]


def test_answers_that_ended_at_a_stop_string_are_continued_in_one_sequence(make_sessions: Callable[..., Any]) -> None:
    with make_sessions(1, "agent.on_rewrite=error") as (sessions, connection, _):
        name = handle(connection, sessions, "take", lease=30.0).session
        messages: list = [USER]
        for number in range(3):
            given = ask(connection, sessions, name, messages, stop=["ab"])
            # The client gets the answer without the stop string, as OpenAI's API has it.
            messages = [*messages, {"role": "assistant", "content": str(number + 1)}, {"role": "user", "content": "go"}]
        handle(connection, sessions, "end", name)
        (sequence,) = sessions.book.find(name, 0.0).forest.sequences()
        spell = sessions.dialogue.tokenizer.decode
        assert "".join(spell([token]) or "#" for token in given.prompt) == ">say 7\n1ab#>go\n2ab#>go\n"
        assert spell(sequence.token_ids[sequence.loss_mask]) == "1ab2ab3ab", "the stop token was not sampled"


def test_conversation_that_does_not_continue_is_refused_if_so_configured(make_sessions: Callable[..., Any]) -> None:
    with make_sessions(1, "agent.on_rewrite=error") as (sessions, connection, prompts):
        name = handle(connection, sessions, "take", lease=30.0).session
        ask(connection, sessions, name, [USER])
        changed = [USER, {"role": "assistant", "content": "of mine"}, USER]
        refused = ask(connection, sessions, name, changed)
        assert (refused.refusal, refused.detail) == (
            Refusal.INVALID,
            (
                "messages[1] is not the answer that this session gave here; this run trains whole conversations alone: "
                "send it back as it was, or begin another one with other messages"
            ),
        )
        assert len(prompts) == 1
        shots = [{"role": "user", "content": "say 6"}, {"role": "assistant", "content": "6"}, USER]
        assert not ask(connection, sessions, name, shots, call="fresh").refusal, "another conversation"


def test_agent_that_is_lost_is_replaced_by_one_that_gets_its_answers(make_sessions: Callable[[int], Any]) -> None:
    with make_sessions(1) as (sessions, connection, prompts):
        lost = handle(connection, sessions, "take", lease=1.0).session
        first = ask(connection, sessions, lost, [USER])
        other = handle(connection, sessions, "take", lease=60.0).session

        async def again() -> str:
            async with asyncio.timeout(20):
                while not (found := (await sessions.handle(SessionCall("take"))).session):  # noqa: ASYNC110 polls
                    await asyncio.sleep(0.05)
                return found

        successor = connection.call(again(), 30)
        assert successor == lost[:-1] + "1"
        assert other != successor
        gone = ask(connection, sessions, lost, [USER])
        assert (gone.refusal, gone.detail) == (
            Refusal.ENDED,
            f"session {lost!r} is over: another agent has its sample, or it never existed",
        )
        replayed = ask(connection, sessions, successor, [USER], call="new")
        assert (replayed.tokens.tolist(), len(prompts)) == (first.tokens.tolist(), 1)


def test_answer_to_a_lost_agent_is_no_turn_of_its_successor(
    make_sessions: Callable[[int], Any], goes_on: threading.Event
) -> None:
    with make_sessions(1) as (sessions, connection, _):
        lost = handle(connection, sessions, "take", lease=60.0).session
        goes_on.clear()
        call = GenerateCall("late", session=lost, messages=[USER])
        asking = begin(connection, sessions, call)
        wait_until(sessions.book.sessions(ROW)[0].answering.locked, "the request")
        handle(connection, sessions, "end", lost, error="the agent crashed")
        goes_on.set()
        late = asking.result(20)
        assert (late.refusal, late.detail) == (
            Refusal.ENDED,
            f"session {lost!r} is over: another agent has its sample",
        )
        (session, _) = connection.call(sessions.close(ROW), 20)
        assert (session.attempt, session.forest.used) == (1, 0)


def test_refilled_sample_begins_with_other_answers_also_for_an_actor_that_takes_the_row_over(
    make_sessions: Callable[..., Any], goes_on: threading.Event
) -> None:
    with make_sessions(1, "agent.on_error=refill") as (sessions, connection, prompts):
        name = handle(connection, sessions, "take", lease=60.0).session
        first = ask(connection, sessions, name, [USER])
        goes_on.clear()
        call = GenerateCall("late", session=name, messages=[{"role": "user", "content": "late"}])
        asking = begin(connection, sessions, call)
        wait_until(sessions.book.sessions(ROW)[0].answering.locked, "the request")
        handle(connection, sessions, "end", name, error="the agent crashed")
        goes_on.set()
        assert asking.result(20).refusal == Refusal.ENDED
        successor = name[:-1] + "1"
        again = ask(connection, sessions, successor, [USER], call="new")
        assert again.prompt.tolist() == first.prompt.tolist()
        assert (len(prompts), again.tokens.tolist() == first.tokens.tolist()) == (3, False)
    with make_sessions(2, "agent.on_error=refill") as (sessions, connection, prompts):
        same = ask(connection, sessions, successor, [USER], call="new", is_retry=True)
        assert (same.tokens.tolist(), prompts) == (again.tokens.tolist(), [])
        (session, _) = connection.call(sessions.close(ROW), 20)
        assert (session.attempt, session.forest.used) == (1, 1)


def test_late_answer_to_a_lost_agent_is_that_of_its_successor_here_as_after_a_take_over(
    make_sessions: Callable[..., Any], server: Server
) -> None:
    """An agent that was lost has not failed: the next one gets what was recorded, also with "refill"."""
    with make_sessions(1, "agent.on_error=refill") as (sessions, connection, prompts):
        name = handle(connection, sessions, "take", lease=1.0).session
        (session, _) = sessions.book.sessions(ROW)
        watches: list[CallWatch] = []
        with stopped(server):
            asking = begin(connection, sessions, GenerateCall("late", session=name, messages=[USER]), watches)
            wait_until(lambda: watches and watches[0].is_cancelled, "the answer, which is being recorded")
            wait_until(lambda: session.attempt, "end of the lease")
        wait_until(lambda: not session.unrecorded, "record of the attempt")
        assert asking.result(20).refusal == Refusal.ENDED
        late = session.forest.turns[0].tokens.tolist()
        successor = name[:-1] + "1"
        assert ask(connection, sessions, successor, [USER], call="new").tokens.tolist() == late
        assert len(prompts) == 1
    with make_sessions(2, "agent.on_error=refill") as (sessions, connection, prompts):
        assert ask(connection, sessions, successor, [USER], call="newer").tokens.tolist() == late
        assert prompts == []


def test_request_that_nobody_waits_for_leaves_the_engines_queue(
    make_sessions: Callable[[int], Any], goes_on: threading.Event
) -> None:
    with make_sessions(1) as (sessions, connection, _):
        name = handle(connection, sessions, "take", lease=60.0).session
        goes_on.clear()
        late = ask(connection, sessions, name, [USER], seconds=0.5)
        assert (late.refusal, late.detail) == (
            Refusal.FAILED,
            "the engine did not finish the request within 0.5 s; try again, or raise the time",
        )
        goes_on.set()
        assert not ask(connection, sessions, name, [USER], call="again").refusal


def test_client_that_leaves_frees_the_engine_and_leaves_no_turn(
    make_sessions: Callable[[int], Any], goes_on: threading.Event
) -> None:
    with make_sessions(1) as (sessions, connection, _):
        name = handle(connection, sessions, "take", lease=60.0).session
        goes_on.clear()
        watches: list[CallWatch] = []
        call = GenerateCall("left", session=name, messages=[USER])
        asking = begin(connection, sessions, call, watches)
        wait_until(lambda: watches and sessions.book.sessions(ROW)[0].answering.locked(), "the request")
        connection.loop.call_soon_threadsafe(watches[0].cancel)
        found = asking.result(20)
        assert (found.refusal, found.detail) == (Refusal.FAILED, "the client has left; nothing was recorded")
        goes_on.set()
        again = ask(connection, sessions, name, [USER], call="again")
        assert not again.refusal
        (session, _) = connection.call(sessions.close(ROW), 20)
        assert [turn.call for turn in session.forest.turns] == ["again"]


def test_limits_of_a_session_are_told(make_sessions: Callable[[int], Any]) -> None:
    with make_sessions(1) as (sessions, connection, _):
        name = handle(connection, sessions, "take", lease=60.0).session
        long = ask(connection, sessions, name, [{"role": "user", "content": "x" * 70}])
        assert long.refusal == Refusal.TOO_LONG
        assert_says(long.detail, "72 tokens", "at most 64", "shorten")
        assert ask(connection, sessions, "group-5-0-0-0", [USER]).refusal == Refusal.ELSEWHERE
        for n in range(4):
            assert not ask(connection, sessions, name, [{"role": "user", "content": str(n)}], call=f"n{n}").refusal
        over = ask(connection, sessions, name, [{"role": "user", "content": "five"}], call="n5")
        assert_says(over.detail, name, "4 answers")
        ended = ask(connection, sessions, name, [USER], call="n6")
        assert_says(ended.detail, name, "max_turns")
        (session, _) = connection.call(sessions.close(ROW), 20)
        assert len(session.forest.sequences()) == 4, "each conversation that continues nothing is a sequence"
