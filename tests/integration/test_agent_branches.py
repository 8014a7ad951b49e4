"""Sessions of agents with several players, several answers to a request, and prompts in place of conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker.table import Table
from relax_actors.messages import SessionLog
from relax_actors.messages.generate import Refusal
from relax_actors.messages.session_log import ROOT
from tests.support.messages import assert_says
from tests.support.session_ends import ROW, USER, ask, handle

PLAYERS = "agent.players=['solver', 'critic']"
MakeSessions = Callable[..., Any]


def after(answer: str, *, question: str = "again") -> list[dict[str, str]]:
    return [USER, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def test_each_player_has_conversations_of_its_own_also_for_an_actor_that_takes_the_row_over(
    make_sessions: MakeSessions,
) -> None:
    with make_sessions(1, PLAYERS) as (sessions, connection, prompts):
        name = handle(connection, sessions, "take", lease=60.0).session
        first = ask(connection, sessions, name, [USER], call="a", player="solver")
        other = ask(connection, sessions, name, [USER], call="b", player="critic")
        assert (first.tokens.tolist() == other.tokens.tolist(), len(prompts)) == (False, 2), "nothing is replayed"
        second = ask(connection, sessions, name, after("1"), call="c", player="solver")
        assert second.prompt.tolist()[: len(first.prompt) + 2] == [*first.prompt, *first.tokens]
    with make_sessions(2, PLAYERS) as (sessions, connection, prompts):
        same = ask(connection, sessions, name, [USER], call="b2", player="critic", is_retry=True)
        assert (same.tokens.tolist(), prompts) == (other.tokens.tolist(), [])
        ask(connection, sessions, name, after("1"), call="d", player="critic")
        rewards = {"critic": 0.5, "solver": 1.0}
        handle(connection, sessions, "end", name, rewards=rewards)
    with make_sessions(3, PLAYERS) as (sessions, connection, _):
        session, _ = connection.call(sessions.close(ROW), 20)
        assert (session.state.reward, session.state.rewards) == (None, rewards)
        assert [turn.parent for turn in session.forest.turns] == [ROOT, ROOT, 0, ROOT], "the critic never said 1"
        found = session.forest.sequences(players=("solver", "critic"))
        assert [one.player for one in found] == ["solver", "critic", "critic"]
        assert found[0].token_ids[found[0].loss_mask].tolist() == [*first.tokens, *second.tokens]


@pytest.mark.parametrize(
    ("settings", "player", "named"),
    [
        ((PLAYERS,), "", ["no player", "solver, critic", "X-Relax-Player"]),
        ((PLAYERS,), "judge", ["'judge'", "solver, critic", "X-Relax-Player"]),
        ((), "solver", ["'solver'", "agent.players is not set", "leave it out"]),
    ],
)
def test_request_of_no_player_of_the_run_is_refused(
    make_sessions: MakeSessions, settings: tuple[str, ...], player: str, named: list[str]
) -> None:
    with make_sessions(1, *settings) as (sessions, connection, prompts):
        name = handle(connection, sessions, "take", lease=60.0).session
        refused = ask(connection, sessions, name, [USER], player=player)
        assert (refused.refusal, prompts) == (Refusal.INVALID, [])
        assert_says(refused.detail, *named)


@pytest.mark.parametrize(
    ("settings", "given", "named"),
    [
        ((PLAYERS,), {"rewards": {"judge": 1.0}}, ["'judge'", "solver, critic"]),
        ((PLAYERS,), {"reward": 1.0}, ['"rewards"', "solver", "in place of `reward`"]),
        ((), {"rewards": {"solver": 1.0}}, ["'solver'", "agent.players is not set"]),
    ],
)
def test_end_with_rewards_that_do_not_fit_the_players_is_refused_and_may_be_repeated(
    make_sessions: MakeSessions, settings: tuple[str, ...], given: dict[str, Any], named: list[str]
) -> None:
    with make_sessions(1, *settings) as (sessions, connection, _):
        name = handle(connection, sessions, "take", lease=60.0).session
        refused = handle(connection, sessions, "end", name, **given)
        assert refused.refusal == Refusal.INVALID
        assert_says(refused.detail, *named)
        assert not handle(connection, sessions, "end", name).refusal


def test_several_answers_to_one_request_are_branches_of_one_parent(make_sessions: MakeSessions, table: Table) -> None:
    with make_sessions(1) as (sessions, connection, prompts):
        name = handle(connection, sessions, "take", lease=60.0).session
        ask(connection, sessions, name, [USER], call="a")
        many = ask(connection, sessions, name, after("1"), call="b", n=2)
        assert [one.tokens.tolist() for one in many.choices] != [many.tokens.tolist()] * 2
        again = ask(connection, sessions, name, after("1"), call="b", n=2)
        assert [one.tokens.tolist() for one in again.choices] == [one.tokens.tolist() for one in many.choices]
        assert len(prompts) == 3
    (cell,) = [
        log
        for subject in table.list_subjects(table.subjects.turn(ROW, 0, "*"))
        if len((log := table.fetch(subject, SessionLog)).turns) > 1
    ]
    assert [(turn.number, turn.turn.parent) for turn in cell.turns] == [(1, 0), (2, 0)], "all of them, or none"
    with make_sessions(2) as (sessions, connection, prompts):
        retry = ask(connection, sessions, name, after("1"), call="c", n=2, is_retry=True)
        assert [one.call for one in retry.choices] == [one.call for one in many.choices]
        assert prompts == []
        longer = [*after("1"), {"role": "assistant", "content": "3"}, {"role": "user", "content": "go"}]
        last = ask(connection, sessions, name, longer, call="d")
        handle(connection, sessions, "end", name, reward=1.0)
        session, _ = connection.call(sessions.close(ROW), 20)
        assert [turn.parent for turn in session.forest.turns] == [ROOT, 0, 0, 2]
        sequences = session.forest.sequences()
        trained = [one.token_ids[one.loss_mask].tolist() for one in sequences]
        first = session.forest.turns[0].tokens.tolist()
        one, two = (choice.tokens.tolist() for choice in many.choices)
        assert trained == [first + one, two + last.tokens.tolist()], "the shared turn is trained once"


@pytest.mark.parametrize(
    ("settings", "n", "named"),
    [
        (("agent.branches=last",), 2, ["n = 2", 'agent.branches = "all"']),
        ((), 5, ["n = 5", "4 answers", "agent.max_turns = 4"]),
    ],
)
def test_several_answers_that_a_session_cannot_have_are_refused(
    make_sessions: MakeSessions, settings: tuple[str, ...], n: int, named: list[str]
) -> None:
    with make_sessions(1, *settings) as (sessions, connection, prompts):
        name = handle(connection, sessions, "take", lease=60.0).session
        refused = ask(connection, sessions, name, [USER], n=n)
        assert (refused.refusal, prompts) == (Refusal.INVALID, [])
        assert_says(refused.detail, *named)
        assert not ask(connection, sessions, name, [USER], call="one").refusal, "the sample goes on"


def test_prompts_continue_their_answers_also_for_an_actor_that_takes_the_row_over(make_sessions: MakeSessions) -> None:
    with make_sessions(1) as (sessions, connection, prompts):
        name = handle(connection, sessions, "take", lease=60.0).session
        first = ask(connection, sessions, name, [], call="a", text="say 7:")
        assert sessions.dialogue.tokenizer.decode(first.tokens) == "1"
    with make_sessions(2) as (sessions, connection, prompts):
        same = ask(connection, sessions, name, [], call="b", text="say 7:", is_retry=True)
        assert (same.tokens.tolist(), prompts) == (first.tokens.tolist(), [])
        second = ask(connection, sessions, name, [], call="c", text="say 7:1, and:")
        more = sessions.dialogue.tokenizer.encode(", and:", special=False)
        assert second.prompt.tolist() == [*first.prompt, *first.tokens, *more]
        third = ask(connection, sessions, name, [], call="d", tokens=second.prompt)
        assert third.prompt.tolist() == second.prompt.tolist(), "asked once more, as tokens"
        handle(connection, sessions, "end", name, reward=1.0)
        session, _ = connection.call(sessions.close(ROW), 20)
        assert [turn.parent for turn in session.forest.turns] == [ROOT, 0, 0]
        assert [one["role"] for one in session.forest.said()] == ["prompt", "assistant", "prompt", "assistant"]


def test_answer_ends_behind_its_first_tool_call_unless_the_run_has_a_least_length(make_sessions: MakeSessions) -> None:
    with make_sessions(1) as (sessions, connection, _):
        name = handle(connection, sessions, "take", lease=60.0).session
        given = ask(connection, sessions, name, [USER], ends=["ab"])
        assert sessions.dialogue.tokenizer.decode(given.tokens) == "1ab"
        (turn,) = sessions.book.sessions(ROW)[0].forest.turns
        assert turn.messages[-1]["content"] == "1ab", "unlike a stop string, the mark is part of the answer"
    with make_sessions(2, "rollout.min_tokens=2") as (sessions, connection, _):
        refused = ask(connection, sessions, name, after("1ab"), call="new", ends=["ab"])
        assert refused.refusal == Refusal.INVALID
        assert_says(refused.detail, "parallel_tool_calls", "rollout.min_tokens = 2")
