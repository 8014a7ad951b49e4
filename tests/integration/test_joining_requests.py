"""Requests of the gateway join the batches of a rollout: none waits for the end of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from broker.table import Table
from relax_actors.messages.generate import GenerateAnswer, GenerateCall
from relax_actors.roles.agent_rollout import AgentRollout
from relax_actors.roles.rollout import Rollout
from tests.support.policy_ends import LONG, USER, PolicyEnds
from tests.support.running import wait_until

AGENTS = ("agent.function=x.y", "reward.function=environment")
MakeEnds = Callable[..., PolicyEnds]


@pytest.fixture
def make_ends(table: Table, tmp_path: Path) -> Iterator[MakeEnds]:
    made: list[PolicyEnds] = []

    def make(role: type[Rollout], *settings: str) -> PolicyEnds:
        made.append(PolicyEnds(table, tmp_path, role, *settings))
        return made[-1]

    yield make
    for ends in made:
        ends.close()


def test_request_of_an_agent_joins_the_batch_in_which_another_ones_is_generated(make_ends: MakeEnds) -> None:
    ends = make_ends(AgentRollout, *AGENTS)
    ends.start(ends.row(0))
    slow = ends.take()
    pieces: list[object] = []
    asking = ends.begin(GenerateCall("long", session=slow, messages=[USER], stream=True, seconds=300), pieces)
    wait_until(lambda: pieces, "the first tokens")
    ends.arriving.append(ends.row(1))
    quick = ends.take()  # of a row that has come meanwhile
    for n in range(3):
        assert len(ends.ask(quick, f"short{n}", max_tokens=3).tokens) == 3
    ends.session("end", quick, reward=1.0)
    assert ends.result(1).trained_lengths.tolist() == [9], "the row leaves while the other one is worked on"
    assert not asking.done()
    asking.cancel()
    ends.session("end", slow, reward=0.0)
    wait_until(lambda: len(ends.results) == 2, "end of the other row")


@pytest.mark.slow
def test_request_waits_while_those_in_generation_leave_no_room_for_its_tokens(make_ends: MakeEnds) -> None:
    ends = make_ends(AgentRollout, *AGENTS, f"rollout.max_running_tokens={LONG + 1000}", "rollout.group_size=2")
    ends.start(ends.row(0))
    sessions = [ends.take() for _ in range(2)]
    pieces: list[list[object]] = [[], []]
    calls = [GenerateCall(f"long{n}", session=sessions[n], messages=[USER], stream=True, seconds=300) for n in range(2)]
    first = ends.begin(calls[0], pieces[0])
    wait_until(lambda: pieces[0], "the first tokens")
    second = ends.begin(calls[1], pieces[1])
    so_far = len(pieces[0])
    wait_until(lambda: len(pieces[0]) > so_far + 30, "more tokens of the first answer")
    assert not pieces[1], "both do not fit"
    first.cancel()
    wait_until(lambda: pieces[1], "tokens of the second answer")
    second.cancel()
    for session in sessions:
        ends.session("end", session, reward=0.0)
    wait_until(lambda: ends.results, "end of the row")


def test_agents_of_a_deterministic_run_get_the_bits_that_they_get_alone(make_ends: MakeEnds) -> None:
    settings = (*AGENTS, "run.deterministic=true", "rollout.max_concurrent_prompts=1", "rollout.group_size=3")
    prompts = [[USER], [{"role": "user", "content": "say something longer"}], [{"role": "user", "content": "x"}]]

    ends = make_ends(AgentRollout, *settings)

    def answers(index: int, *, together: bool) -> list[GenerateAnswer]:
        ends.start(ends.row(index, seed=5))
        sessions = sorted(ends.take() for _ in prompts)
        calls = [
            GenerateCall(f"{index}.{n}", session=name, messages=prompts[n], max_tokens=40)
            for n, name in enumerate(sessions)
        ]
        if together:
            found = [asking.result(60) for asking in [ends.begin(call) for call in calls]]
        else:
            found = [ends.begin(call).result(60) for call in reversed(calls)][::-1]
        for name in sessions:
            ends.session("end", name, reward=0.0)
        ends.result(index)
        ends.join()
        return found

    for one, other in zip(answers(0, together=True), answers(1, together=False), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_requests_that_never_cease_get_newer_weights(make_ends: MakeEnds) -> None:
    ends = make_ends(Rollout, "rollout.in_flight_updates=false")
    answered: list[GenerateAnswer] = []
    ends.serve(lambda: bool(answered) and int(answered[-1].versions[-1]) == 1)
    tokens = np.array([1, 2, 10], np.int32)
    asking = {n: ends.begin(GenerateCall(f"{n}", tokens=tokens, seed=n, max_tokens=20 + n)) for n in range(8)}
    count = len(asking)

    def has_newer() -> bool:
        nonlocal count
        for n in [n for n, one in asking.items() if one.done()]:
            answered.append(asking.pop(n).result())
            asking[count] = ends.begin(GenerateCall(f"{count}", tokens=tokens, seed=count, max_tokens=20 + count % 8))
            count += 1
        return any(1 in answer.versions for answer in answered)

    wait_until(lambda: has_newer() or answered, "the first answer")
    ends.trainer.step()
    wait_until(has_newer, "an answer of the newer weights")
    assert all(len(set(answer.versions.tolist())) == 1 for answer in answered)
    for one in asking.values():
        one.cancel()
