"""The loop that plays an episode: what it asks of the environment and of the policy, from any place of the episode."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.messages import Act, EnvironmentAnswer, Fault, FinishReason, Open, SessionState, SessionTurn
from relax_actors.sessions.environment import MAX_LOSSES, EnvironmentFailedError, SessionEnvironment, play
from relax_actors.sessions.episode import Episode
from tests.support.messages import assert_says
from tests.support.turns import repeat_turns
from tests.unit.test_episode import answer, episode, write

TEMPLATE = GenerationRequest(np.zeros(0, np.int32), 0, 2, 0.5, 1.0, 8, frozenset(), min_tokens=9)


class Stage:
    """An episode, its environment, and everything that the loop reports.

    Args:
        one: the episode.
        begins_again: whether an episode begins again whose environment failed.
    """

    def __init__(self, one: Episode, *, begins_again: bool = False) -> None:
        self.log: list[SessionTurn | SessionState] = []
        self.closed: list[str] = []
        self.failures: list[EnvironmentFailedError] = []
        self.counts: Counter[str] = Counter()
        self._begins_again = begins_again
        self.environment = SessionEnvironment("s", {"prompt": "p"}, 9, "rollout.0#1", self.closed.append, self.counts)
        self.playing = play(one, self.environment, TEMPLATE, self, self._fail)  # type: ignore[arg-type]

    def add(self, record: SessionTurn | SessionState) -> None:
        self.log.append(record)

    def _fail(self, one: Episode, error: EnvironmentFailedError) -> None:
        self.failures.append(error)
        if self._begins_again:
            one.restart()
        else:
            one.end(FinishReason.ERROR)

    def send(self, outcome: Any = None) -> Any:
        """Give the loop an outcome; return what it wants next, or None at its end."""
        try:
            return self.playing.send(outcome)
        except StopIteration:
            return None


def said(text: str) -> Generation:
    tokens = np.array([ord(c) for c in text], np.int32)
    return Generation(tokens, np.zeros(len(text), np.float32), np.zeros(len(text), np.int32), FinishReason.STOP)


def lost(operation: Open | Act) -> EnvironmentAnswer:
    return EnvironmentAnswer(operation.session, 0, error=Fault.LOST)


def test_an_episode_is_asked_and_stepped_until_its_environment_ends_it() -> None:
    one = episode()
    stage = Stage(one)
    opening = stage.send()
    assert opening == Open("s@rollout.0#1.1", {"prompt": "p"}, 9)
    request = stage.send(answer("a"))
    assert (request.tokens.tolist(), request.seed, request.samples) == ([1, 2, 3, ord("a")], one.seed, 1)
    assert (request.max_tokens, request.min_tokens, request.temperature) == (5, 5, 0.5)
    assert stage.send(said("x")) == Act(opening.session, 0, "x")
    assert stage.send(answer("b")).tokens.tolist() == [1, 2, 3, *map(ord, "axb")]
    assert stage.send(said("yz")) == Act(opening.session, 1, "yz")
    assert stage.send(answer(done=True, reward=0.5)) is None
    assert (one.reason, one.rewards) == (FinishReason.ENV_DONE, {"": 0.5})
    assert [type(record) for record in stage.log] == [SessionTurn, SessionTurn, SessionState]
    assert stage.closed == [opening.session]


def test_a_lost_environment_is_opened_again_with_the_actions_so_far() -> None:
    stage, seen = Stage(episode()), [answer("a"), answer("b")]
    stage.send()
    stage.send(seen[0])
    stage.send(said("x"))
    stage.send(seen[1])
    act = stage.send(said("y"))
    again = stage.send(lost(act))
    assert isinstance(again, Open)
    assert again.session != act.session
    assert (again.actions, again.digests, again.state) == (["x"], [seen[1].digest], None)
    assert stage.send(answer("b")) == Act(again.session, 1, "y")
    assert stage.closed == [act.session]
    assert stage.counts == {"sessions_opened": 2, "sessions_lost": 1}


def test_an_environment_with_a_state_is_restored_from_it() -> None:
    stage = Stage(episode())
    stage.send()
    stage.send(answer("a"))
    stage.send(said("x"))
    stage.send(answer("b", state=b"after x"))
    again = stage.send(lost(stage.send(said("y"))))
    assert (again.actions, again.digests, again.state) == (["x"], [], b"after x")


def test_a_resumed_episode_goes_on_at_its_last_action() -> None:
    one, other = episode(), episode()
    turns = []
    for text in ("x", "y"):
        one.step(answer("a"))
        turns.append(write(one, text))
    assert repeat_turns([other] * 3, turns) == 2
    stage = Stage(other)
    opening = stage.send()
    assert opening.actions == ["x"]
    assert stage.send(answer("a")) == Act(opening.session, 1, "y")
    assert stage.send(answer("b")).tokens.tolist() == [1, 2, 3, *map(ord, "axayb")]
    assert stage.log == [], "what is written already is not written again"


def test_an_environment_that_is_lost_again_and_again_fails() -> None:
    one = episode()
    stage = Stage(one)
    operation = stage.send()
    for _ in range(MAX_LOSSES + 1):
        assert isinstance(operation, Open)
        operation = stage.send(lost(operation))
    assert operation is None
    assert [error.fault for error in stage.failures] == [Fault.LOST]
    assert one.reason is FinishReason.ERROR
    assert stage.log == [], "an episode whose environment failed may be played again"


@pytest.mark.parametrize("fault", [Fault.ENVIRONMENT, Fault.REPLAY])
def test_an_episode_whose_environment_failed_begins_again_in_another_one(fault: Fault) -> None:
    one = episode()
    stage = Stage(one, begins_again=True)
    opening = stage.send()
    again = stage.send(EnvironmentAnswer(opening.session, -1, error=fault, detail="it broke"))
    assert isinstance(again, Open)
    assert (again.session, again.actions, one.attempt) == ("s@rollout.0#1.2", [], 1)
    assert (stage.failures[0].fault, str(stage.failures[0])) == (fault, f"{fault}: it broke")


def test_an_observation_that_cannot_be_read_is_a_failure_of_the_environment() -> None:
    one = episode()
    stage = Stage(one)
    opening = stage.send()
    assert stage.send(answer("a", player="judge")) is None
    assert (stage.failures[0].fault, one.reason) == (Fault.ENVIRONMENT, FinishReason.ERROR)
    assert_says(stage.failures[0], "observation", "'judge'")
    assert stage.closed == [opening.session]


def test_an_episode_that_takes_too_long_is_written_and_its_environment_closed() -> None:
    one = episode()
    stage = Stage(one)
    opening = stage.send()
    one.end(FinishReason.TIMEOUT)
    stage.playing.close()
    assert stage.log == [one.state]
    assert stage.closed == [opening.session]
