"""Session forest: what a request continues, what is replayed, and what is trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_actors.messages.session_log import ROOT, Turn
from relax_actors.sessions.continuations import conversation_keys
from relax_actors.sessions.forest import Forest

USER = {"role": "user", "content": "hello"}


def turn_of(asked: str) -> Turn:
    empty = np.zeros(0, np.int32)
    return Turn(ROOT, empty, empty, np.zeros(0, np.float32), empty, asked=asked, state="state")


def turn(forest: Forest, messages: list[dict[str, Any]], answer: str, call: str = "") -> int:
    """Answer a conversation, with tokens that name the turn."""
    keys = conversation_keys(messages)
    parent, covered = forest.continued(keys)
    number = len(forest.turns)
    new = len(messages) - covered
    state = conversation_keys([*messages, {"role": "assistant", "content": answer}])[-1]
    tokens = np.array([1000 + number] * 2, np.int32)
    added = Turn(
        parent,
        np.arange(new, dtype=np.int32),
        tokens,
        np.full(2, -0.5, np.float32),
        np.full(2, number, np.int32),
        asked=keys[-1],
        state=state,
        call=call,
    )
    return forest.add(added)


def said(messages: list[dict[str, Any]], answer: str, reply: str) -> list[dict[str, Any]]:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": reply}]


def test_request_continues_the_longest_answered_beginning() -> None:
    forest = Forest()
    first = turn(forest, [USER], "a")
    second = turn(forest, said([USER], "a", "more"), "b")
    edited = turn(forest, said([USER], "changed", "more"), "c")
    assert [forest.turns[n].parent for n in (first, second, edited)] == [ROOT, first, ROOT]
    assert forest.leaves() == [second, edited]
    assert forest.tokens(second).tolist() == [0, 1000, 1000, 0, 1001, 1001]


def test_answer_that_the_policy_did_not_give_is_read_and_not_trained() -> None:
    """An agent may put words into the policy's mouth; they are part of the prompt of the next answer."""
    forest = Forest()
    turn(forest, [USER], "a")
    turn(forest, said(said([USER], "a", "more"), "invented", "go on"), "b")
    turn(forest, said([USER], "invented", "go on"), "c")
    one, other = forest.sequences("all")
    assert one.token_ids.tolist() == [0, 1000, 1000, 0, 1, 2, 1001, 1001]
    assert one.loss_mask.tolist() == [False, True, True, False, False, False, True, True]
    assert other.loss_mask.tolist() == [False, False, False, True, True]


def test_branches_share_their_beginning_which_is_trained_once() -> None:
    forest = Forest()
    turn(forest, [USER], "a")
    for reply in ("left", "right"):
        turn(forest, said([USER], "a", reply), reply)
    left, right = forest.sequences("all")
    assert left.loss_mask.tolist() == [False, True, True, False, True, True]
    assert right.loss_mask.tolist() == [False, False, False, False, True, True]
    assert right.versions.tolist() == [-1, 0, 0, -1, 2, 2]
    assert right.spans is not None
    assert right.spans.tolist() == [[1, 3], [4, 6]]
    (last,) = forest.sequences("last")
    assert last.token_ids.tolist() == right.token_ids.tolist()
    assert last.loss_mask.tolist() == [False, True, True, False, True, True]


def test_restarted_agent_gets_the_recorded_answers_in_order() -> None:
    forest = Forest()
    asked = conversation_keys([USER])[-1]
    turn(forest, [USER], "a")
    turn(forest, [USER], "b")
    turn(forest, said([USER], "b", "go on"), "c")
    copy = Forest(forest.turns)
    assert copy.replayed(asked) == []
    copy.restart()
    assert [copy.replayed(asked) for _ in range(3)] == [[0], [1], []]
    assert copy.leaves() == [0, 1]
    assert len(copy.sequences()) == 2


def test_repeated_request_gets_its_own_answer() -> None:
    forest = Forest()
    asked = conversation_keys([USER])[-1]
    assert forest.replayed(asked, "x", is_retry=True) == []
    turn(forest, [USER], "a", call="x")
    assert forest.replayed(asked, "x") == [0]
    assert forest.replayed(asked, "y", is_retry=True) == [0]
    assert forest.replayed(asked, "z") == []


def test_turn_of_an_unknown_parent_is_refused() -> None:
    empty = np.zeros(0, np.int32)
    with pytest.raises(ValueError, match=r"^turn 0 .*turn 3, which does not exist"):
        Forest().add(Turn(3, empty, empty, empty, empty, asked="a", state="b"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.sampled_from("xy")), max_size=12))
def test_each_sampled_token_is_trained_exactly_once(steps: list[tuple[int, str, str]]) -> None:
    forest = Forest()
    conversations: list[list[dict[str, Any]]] = [[USER]]
    for pick, answer, reply in steps:
        messages = conversations[pick % len(conversations)]
        turn(forest, messages, answer)
        conversations.append(said(messages, answer, reply))
    sequences = forest.sequences("all")
    trained = [int(token) for s in sequences for token in s.token_ids[s.loss_mask]]
    assert sorted(trained) == sorted([1000 + n for n in range(len(steps))] * 2)
    for leaf, sequence in zip(forest.leaves(), sequences, strict=True):
        assert sequence.token_ids.tolist() == forest.tokens(leaf).tolist()
        assert (sequence.versions >= 0).tolist() == (sequence.token_ids >= 1000).tolist()
    rebuilt = Forest(forest.turns).sequences("all")
    assert [s.token_ids.tolist() for s in rebuilt] == [s.token_ids.tolist() for s in sequences]


def test_keys_ignore_how_an_sdk_spells_a_message() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1.0, "a": 2}'}}
    as_object = {"id": "c1", "type": "function", "function": {"arguments": {"a": 2, "b": 1}, "name": "f"}, "index": 0}
    one = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    other = {"role": "assistant", "content": "", "tool_calls": [as_object], "reasoning_content": "hm"}
    assert conversation_keys([USER, one]) == conversation_keys([USER, other])
    parts = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    assert conversation_keys([parts]) == conversation_keys([USER])


def test_keys_tell_apart_what_the_model_reads_differently() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    variants = [
        conversation_keys([USER]),
        conversation_keys([USER], [tool]),
        conversation_keys([USER], [], {"enable_thinking": False}),
        conversation_keys([{"role": "system", "content": "hello"}]),
        conversation_keys([{"role": "user", "content": "hello "}]),
    ]
    assert len({keys[-1] for keys in variants}) == len(variants)


def test_turn_whose_agent_left_is_exported_once_the_agent_has_asked_for_it_again() -> None:
    forest, asked = Forest(), conversation_keys([USER])[-1]
    first = turn(forest, [USER], "a", call="c0")
    second = turn(forest, said([USER], "a", "more"), "b", call="c1")
    forest.departed(second)
    assert (forest.leaves(), forest.last, forest.used, forest.exported()) == ([first], first, 2, {first})
    (sequence,) = forest.sequences()
    assert sequence.token_ids[sequence.loss_mask].tolist() == [1000, 1000], "the agent never read the second answer"
    assert forest.replayed(forest.turns[second].asked, "c2", deliverer="gateway.0#1") == [second]
    assert (forest.leaves(), forest.last) == ([second], second)
    forest.departed(first)
    assert forest.leaves() == [second], "an answer that was continued has arrived"
    for _ in range(2):
        assert forest.replayed(asked, "c0", deliverer="gateway.0#1") == [first], "of a repeated request"
        forest.departed(first)
    third = turn(forest, said([USER], "a", "other"), "c", call="c3")
    forest.departed(third)
    forest.arrived(third)
    assert forest.leaves() == [second, third], "the note of another gateway had come before"


def test_answer_that_did_not_arrive_is_given_again_and_one_that_did_is_not() -> None:
    forest, asked = Forest(), conversation_keys([USER])[-1]
    first = forest.add(replace(turn_of(asked), call="c0"), deliverer="gateway.0#1")
    assert forest.replayed(asked, "c1", deliverer="gateway.0#1") == [], "the same gateway may ask for another sample"
    assert forest.replayed(asked, "c2", deliverer="gateway.0#2") == [first], "the first gateway is gone"
    forest.departed(first)
    assert forest.replayed(asked, "c3", deliverer="gateway.0#2") == [first], "its client has left"
    forest.arrived(first)
    assert forest.replayed(asked, "c4", deliverer="gateway.0#3") == []
    restored = Forest(forest.turns)
    assert restored.replayed(asked, "c5", deliverer="gateway.0#3") == [first], "nobody knows whether it arrived"


def test_several_answers_to_one_request_are_branches_that_are_replayed_together() -> None:
    forest, asked = Forest(), f"{conversation_keys([USER])[-1]}.2"
    for call in ("c0", "c0-1", "c1", "c1-1"):
        forest.add(replace(turn_of(asked), call=call), deliverer="gateway.0#1")
    copy = Forest(forest.turns)
    copy.restart()
    assert copy.replayed(asked, "d", n=2, deliverer="gateway.0#1") == [0, 1]
    assert copy.replayed(asked, "e", n=2, is_retry=True, deliverer="gateway.0#1") == [0, 1], "of the first request"
    assert copy.replayed(asked, "f", n=2, deliverer="gateway.0#1") == [2, 3]
    assert copy.replayed(asked, "g", n=2, deliverer="gateway.0#1") == []
    assert copy.replayed(asked, "c0", n=2) == [0, 1], "of the same call"
    assert copy.leaves() == [0, 1, 2, 3]


def test_last_branch_of_each_player_is_exported() -> None:
    forest = Forest()
    for player in ("solver", "solver", "critic", "solver", "critic"):
        tokens = np.array([1000 + len(forest.turns)], np.int32)
        number = np.zeros(1, np.float32)
        messages = [{"role": "assistant", "content": str(len(forest.turns))}]
        added = Turn(ROOT, np.zeros(1, np.int32), tokens, number, np.zeros(1, np.int32), player=player)
        forest.add(replace(added, messages=messages))
    players = ("critic", "solver")
    assert [s.player for s in forest.sequences(players=players)] == ["critic", "critic", "solver", "solver", "solver"]
    last = forest.sequences("last", players=players)
    assert [(s.player, s.token_ids.tolist()) for s in last] == [("critic", [0, 1004]), ("solver", [0, 1003])]
    assert forest.said(players) == [
        {"role": "assistant", "content": "4", "player": "critic"},
        {"role": "assistant", "content": "3", "player": "solver"},
    ]


def test_conversations_of_two_players_have_no_key_in_common() -> None:
    keys = [set(conversation_keys([USER, USER], player=player)) for player in ("", "solver", "critic")]
    assert len(set.union(*keys)) == sum(map(len, keys))


def test_entropies_of_turns_are_those_of_sequences_where_all_are_known() -> None:
    forest = Forest()
    turn(forest, [USER], "a")
    turn(forest, said([USER], "a", "more"), "b")
    known = Forest(replace(each, entropies=np.full(2, n + 0.5, np.float32)) for n, each in enumerate(forest.turns))
    (sequence,) = known.sequences()
    assert sequence.entropies is not None
    assert sequence.entropies.tolist() == [0, 0.5, 0.5, 0, 1.5, 1.5]
    assert Forest([known.turns[0], forest.turns[1]]).sequences()[0].entropies is None  # the run was resumed with them
    with pytest.raises(ValueError, match="different lengths"):
        replace(forest.turns[0], entropies=np.zeros(3, np.float32))
