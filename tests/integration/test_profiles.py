"""Profiles that an operator asks a live trainer for: between steps, one at a time, with an answer to each request."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import pytest
import torch

from broker.connection import Connection
from broker.table import Table
from relax_actors.engines.torch.profile import Profiled
from relax_actors.errors import ConfigError
from relax_actors.messages.profile import ProfileCall
from relax_actors.monitoring.timeline.profiles import parse_actor, profiles_of, take_profile
from tests.support.contexts import MakeTrainer
from tests.support.steps import put_step, read_all


class Asked:
    """A request for a profile, and the states that it has reached."""

    def __init__(self, connection: Connection, run: str, steps: int, seconds: float = 600.0) -> None:
        self.states: list[str] = []
        self._waits = threading.Event()
        call = ProfileCall(steps, seconds)
        self.answer = connection.submit(take_profile(connection, run, "trainer", call, self._enter))

    def _enter(self, state: str) -> None:
        self.states.append(state)
        self._waits.set()

    def wait_for_state(self) -> None:
        assert self._waits.wait(20)


def test_trainer_profiles_its_next_step_and_refuses_others_meanwhile(
    make_trainer: MakeTrainer, table: Table, connection: Connection
) -> None:
    trainer = make_trainer()
    run = table.subjects.run
    asked = Asked(connection, run, 2)
    asked.wait_for_state()
    assert asked.states == ["waiting"]
    put_step(table, 0, version=0)
    read_all(table, trainer)
    with pytest.raises(ConfigError, match=r"trainer\.0 is being profiled.*wait"):
        Asked(connection, run, 1).answer.result(20)
    put_step(table, 1, version=1)
    read_all(table, trainer)
    answer = asked.answer.result(20)
    assert answer.state == "written"
    assert profiles_of(trainer.context.folder) == [Path(file) for file in answer.files]
    with gzip.open(answer.files[0]) as trace:
        names = [event.get("name", "") for event in json.load(trace)["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    trainer.close()


def test_profile_that_waits_in_vain_ends_at_its_deadline_or_makes_room_for_the_next_request(
    make_trainer: MakeTrainer, table: Table, connection: Connection
) -> None:
    trainer = make_trainer()
    run = table.subjects.run
    with pytest.raises(ConfigError, match=r"trainer\.0 did 0 of 1 steps"):
        Asked(connection, run, 1, 0.1).answer.result(20)
    left = Asked(connection, run, 1)
    left.wait_for_state()
    asked = Asked(connection, run, 1)
    asked.wait_for_state()
    with pytest.raises(ConfigError, match=r"later request to profile trainer\.0"):
        left.answer.result(20)
    put_step(table, 0, version=0)
    read_all(table, trainer)
    assert len(asked.answer.result(20).files) == 1
    trainer.close()


def test_actor_that_waits_between_two_steps_drops_its_profile_at_the_deadline(
    make_trainer: MakeTrainer, table: Table, connection: Connection
) -> None:
    trainer = make_trainer()
    run = table.subjects.run
    asked = Asked(connection, run, 2, 2.0)
    asked.wait_for_state()
    put_step(table, 0, version=0)
    read_all(table, trainer)
    with pytest.raises(ConfigError, match=r"trainer\.0 did [01] of 2 steps in 2 s"):
        asked.answer.result(20)
    again = Asked(connection, run, 1)
    again.wait_for_state()
    put_step(table, 1, version=1)
    read_all(table, trainer)
    assert len(again.answer.result(20).files) == 1
    assert len(profiles_of(trainer.context.folder)) == 1
    trainer.close()


def test_requests_that_nobody_can_serve_are_answered(
    make_trainer: MakeTrainer, table: Table, connection: Connection
) -> None:
    run = table.subjects.run
    with pytest.raises(ConfigError, match=r"run .* has no live trainer\.0"):
        Asked(connection, run, 1).answer.result(20)
    trainer = make_trainer()
    with pytest.raises(ConfigError, match="1 to 20 steps, not 21"):
        Asked(connection, run, 21).answer.result(20)
    with pytest.raises(ConfigError, match="86400 s, not nan"):
        Asked(connection, run, 1, float("nan")).answer.result(20)
    trainer.close()


def test_cancelled_recording_is_not_written_and_the_next_one_is(tmp_path: Path) -> None:
    engine, path = Profiled(), tmp_path / "trace.json.gz"
    engine.begin_profile()
    engine.cancel_profile()
    assert engine.end_profile(path) == []
    for _ in range(2):  # the first of the two is discarded
        engine.begin_profile()
        torch.ones(2).cos()
    assert engine.end_profile(path) == [path]
    with gzip.open(path) as trace:
        names = [event.get("name") for event in json.load(trace)["traceEvents"]]
    assert names.count("aten::cos") == 1


@pytest.mark.parametrize("name", ["reward", "trainer.x", "", "trainer.-1"])
def test_names_of_no_actor_that_can_be_profiled_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"name an actor: trainer, or rollout\.N"):
        parse_actor(name)
