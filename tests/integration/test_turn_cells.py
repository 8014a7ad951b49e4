"""Turn cells on a real server: written by two actors, read in order, and only what follows is taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.codec import encode
from broker.subjects import RowId
from broker.table import Table
from relax_actors.data.renderer import Extension, Message
from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.envs.client import EnvironmentClient
from relax_actors.messages import EnvironmentAnswer, FinishReason, Prompt, SessionLog, SessionTurn
from relax_actors.runtime import Row
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.episode_batch import EpisodeBatch, Rules
from relax_actors.sessions.episode_start import Limits, Start
from relax_actors.sessions.session_log import LazyLog, read_log, restore
from tests.support.asked import Asked
from tests.support.contexts import MakeContext
from tests.support.running import wait_until

ROW = RowId(4, 1)
LIMITS = Limits(max_turns=9, max_tokens=2, room=60)


class Digits:
    """Conversation of numbers; observations have no tokens."""

    needs_stop, offers_tools = False, False

    def prompt(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        del messages
        return np.zeros(0, np.int32)

    def extend(self, history: Sequence[Message], answer: Any, new: Sequence[Message]) -> Extension:
        del history, answer
        return Extension(self.prompt(new), is_faithful=True)

    def text(self, tokens: NDArray[Any]) -> str:
        return str(tokens.tolist())


def episodes() -> list[Episode]:
    return [Episode(Start(RowId(0, 0), i, 5, np.array([3, 4], np.int32)), LIMITS, Digits()) for i in range(2)]


def read(table: Table) -> tuple[list[SessionLog], int]:
    return table.call(read_log(table, ROW))


def turn(episode: Episode, token: int, log: LazyLog) -> None:
    episode.step(EnvironmentAnswer("s", episode.turns - 1))
    log.add(say(episode, token))


def say(episode: Episode, token: int) -> SessionTurn:
    one = np.array([token], np.int32)
    return episode.say(Generation(one, one.astype(np.float32), one, FinishReason.STOP))


def test_turns_of_a_row_are_read_in_order_and_two_actors_do_not_mix(make_context: MakeContext) -> None:
    table = make_context("rollout").table
    subjects = table.subjects
    first = episodes()
    log = LazyLog(table, ROW)
    for number in range(3):
        for episode in first:
            turn(episode, number, log)
        log.flush()
    wait_until(lambda: table.count_cells(subjects.turn(ROW, 0, "*")) == 3, "turn cells")
    logs, length = read(table)
    assert length == 3
    again = episodes()
    assert restore(again, logs) == 6
    assert [e.actions for e in again] == [e.actions for e in first]
    assert {(e.state, e.reading) for e in again} == {(None, None)}

    # The first actor was taken for dead, but writes a further turn while its successor writes others.
    turn(first[0], 7, log)
    log.flush()
    wait_until(lambda: table.count_cells(subjects.turn(ROW, "*", "*")) == 4, "turn cells")
    later = LazyLog(table, ROW, length)
    turn(again[0], 8, later)
    turn(again[1], 8, later)
    later.flush()
    turn(again[1], 9, later)
    later.flush()
    wait_until(lambda: table.count_cells(subjects.turn(ROW, "*", "*")) == 6, "turn cells")
    turn(first[1], 7, log)
    log.flush()
    wait_until(lambda: table.count_cells(subjects.turn(ROW, "*", "*")) == 7, "turn cells")
    logs, length = read(table)
    third = episodes()
    assert restore(third, logs) == 9
    assert [e.actions[3:] for e in third] == [["[7]"], ["[8]", "[9]"]], "each follows one of the two"
    assert length == 7


def test_a_malformed_turn_cell_is_skipped(make_context: MakeContext) -> None:
    table = make_context("rollout").table
    table.put_encoded([(table.subjects.turn(ROW, 0, 0), b"garbage")])
    table.put(table.subjects.turn(ROW, 0, 1), SessionLog())
    assert read(table) == ([SessionLog()], 2)


def test_turns_that_are_too_large_for_one_cell_are_written_as_several(make_context: MakeContext) -> None:
    table = make_context("rollout").table
    log, (one, other) = LazyLog(table, ROW), episodes()
    for size in (2, 2, 2, 5, 1):
        for each in (one, other):
            each.step(EnvironmentAnswer("s", each.turns - 1, [{"role": "user", "content": "x" * (size << 20)}]))
            log.add(say(each, size))
    log.flush()
    wait_until(lambda: table.count_cells(table.subjects.turn(ROW, "*", "*")) >= 7, "turn cells")
    again = episodes()
    # No cell can hold an observation of 5 MiB: what follows it is generated again.
    assert restore(again, read(table)[0]) == 6
    assert [e.turns for e in again] == [3, 3]


def test_time_of_an_episode_counts_from_its_first_actor(make_context: MakeContext) -> None:
    context = make_context("rollout", "environment.name=tiny_pick.Pick", "environment.episode_seconds=50")
    old, young = RowId(4, 1), RowId(4, 2)
    for row, seconds in ((old, 51.0), (young, 5.0)):
        log, (first, _) = LazyLog(context.table, row), episodes()
        turn(first, 7, log)
        log.flush(seconds)
    turns = context.table.subjects.turns("group")
    wait_until(lambda: context.table.count_cells(turns) == 2, "turn cells")
    client = EnvironmentClient(context)
    template = GenerationRequest(np.zeros(0, np.int32), 0, 2, 1.0, 1.0, 8, frozenset())
    batch = EpisodeBatch(
        context,
        client,
        Rules(Digits(), LIMITS, template),
        Asked(),
        start=lambda _: Start(RowId(0, 0), 0, 5, np.array([3, 4], np.int32)),
        result=lambda group: group,
        counts=defaultdict(float),
    )
    prompt = {"prompt": encode(Prompt("34>", np.array([3, 4], np.int32), "", {}, 5, 0), "prompts.0#1")}
    assert batch.open([Row(row, prompt, context.table.store) for row in (old, young)]) == []
    batch.exchange()
    reasons = {group.row.id: [episode.reason for episode in group.members] for group in batch.groups}
    assert reasons == {old: [FinishReason.TIMEOUT, FinishReason.TIMEOUT], young: [None, None]}
    assert [group.members[0].turns for group in batch.groups] == [1, 1]
    client.close()
