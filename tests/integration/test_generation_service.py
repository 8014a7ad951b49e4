"""Requests of the gateway to a rollout actor through the accounts of their users, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from broker.connection import Connection
from broker.leases import RunState
from broker.permissions import OPERATOR
from broker.store import Store
from broker.streams import open_bucket
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import Generation
from relax_actors.engines.protocols.guests import Guests
from relax_actors.messages import FinishReason
from relax_actors.messages.generate import GenerateCall
from relax_actors.runtime import Context
from relax_actors.serving import generation_service
from relax_actors.serving.errors import ApiError
from relax_actors.serving.generation_service import GenerationService, Surroundings
from relax_actors.serving.run_policy import RunPolicy
from relax_actors.supervision.streams import ensure_run_streams
from tests.support.contexts import context_of
from tests.support.embedded import Embedded
from tests.support.running import TINY, wait_until

RUN = "asking"
GATEWAY = ("gateway.port=0",)
LEASE = {"pid": 1, "incarnation": 1, "since": 0.0, "rows": [], "waits_for": None, "doing_since": 0.0}
PROMPT = np.array([1, 2], np.int32)


class Ends:
    """A rollout actor without an engine, and the policy as a gateway asks it, each with the rights of its user."""

    def __init__(self, broker: Embedded, folder: Path) -> None:
        self.broker = broker
        self._connections: list[Connection] = []
        with closing(Connection(broker.address(OPERATOR), "root")) as root:
            root.call(ensure_run_streams(root, broker.config), 60)
            table = Table(root, Subjects(RUN), Store(folder / "store"), "test.0#1")
            contexts = {role: context_of(table, folder, role, GATEWAY, 1) for role in ("rollout", "gateway")}
        rollout, gateway = (self._as_user(broker, context) for context in contexts.values())
        self.guests = Guests()
        tokenizer = Tokenizer(rollout.config.model_path)
        self.size = tokenizer.size
        around = Surroundings(self.guests, tokenizer, 64, lambda _: (tokenizer.stop_ids, None), {})
        GenerationService(rollout, around).start()
        rollout.table.connection.call(rollout.state.renew_lease("rollout", 0, LEASE, 60), 20)
        self.connection, self.policy = gateway.table.connection, RunPolicy(gateway)

    def _as_user(self, broker: Embedded, context: Context) -> Context:
        connection = Connection(broker.address(context.role), context.role)
        self._connections.append(connection)
        bucket = connection.call(open_bucket(connection, context.table.subjects, 20), 30)
        table = Table(connection, context.table.subjects, context.table.store, context.author)
        return replace(context, table=table, state=RunState(connection, bucket))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(generation_service, "ALIVE_SECONDS", 0.1)
    broker = Embedded(tmp_path / "broker", load_config(TINY, [f"run.name={RUN}", *GATEWAY]))
    broker.start()
    found = Ends(broker, tmp_path)
    yield found
    found.close()
    broker.stop()


def test_request_that_waits_longer_than_the_interval_of_signs_of_life_is_answered(ends: Ends) -> None:
    call = GenerateCall("slow", tokens=PROMPT, seconds=60)
    asking = asyncio.run_coroutine_threadsafe(ends.policy.generate(call), ends.connection.loop)
    (guest,) = wait_until(lambda: ends.guests.take(1), "the request")
    with pytest.raises(TimeoutError):
        asking.result(1.0)  # ten signs of life
    guest.done(Generation(PROMPT, np.zeros(2, np.float32), np.zeros(2, np.int32), FinishReason.STOP))
    assert asking.result(10).tokens.tolist() == PROMPT.tolist()


def test_stop_tokens_of_a_request_end_its_answer(ends: Ends) -> None:
    call = GenerateCall("stops", PROMPT, stop_ids=[5], seconds=20)
    answering = asyncio.run_coroutine_threadsafe(ends.policy.generate(call), ends.connection.loop)
    (guest,) = wait_until(lambda: ends.guests.take(1), "the request")
    assert guest.request.stop_ids > {5}, "those of the tokenizer stay"
    tokens = np.array([4, 5], np.int32)
    guest.done(Generation(tokens, np.zeros(2, np.float32), tokens, FinishReason.STOP))
    assert answering.result(20).tokens.tolist() == [4, 5]
    unknown = GenerateCall("unknown", PROMPT, stop_ids=[1000], seconds=20)
    refused = ends.connection.call(ends.policy.generate(unknown), 20)
    assert refused.detail == f"stop token 1000 is not in the vocabulary of {ends.size} tokens"


def test_request_that_waits_while_the_broker_is_killed_is_asked_again(ends: Ends) -> None:
    call = GenerateCall("cut off", tokens=PROMPT, seconds=60)
    asking = asyncio.run_coroutine_threadsafe(ends.policy.generate(call), ends.connection.loop)
    (first,) = wait_until(lambda: ends.guests.take(1), "the request")
    ends.broker.server.stop(0)
    ends.broker.start()
    (second,) = wait_until(lambda: ends.guests.take(1), "the request, again")
    assert wait_until(lambda: first.request.watch.is_cancelled, "end of the first one")
    assert second.request.tokens.tolist() == PROMPT.tolist()
    second.done(Generation(PROMPT, np.zeros(2, np.float32), np.zeros(2, np.int32), FinishReason.STOP))
    assert asking.result(10).tokens.tolist() == PROMPT.tolist()


def test_request_that_the_engine_does_not_finish_is_refused_within_its_own_time(ends: Ends) -> None:
    with pytest.raises(ApiError) as found:
        ends.connection.call(ends.policy.generate(GenerateCall("late", tokens=PROMPT, seconds=0.5)), 10)
    text = "no rollout actor answered within 0.5 s; see `relax tree` for the state of the run"
    assert (found.value.status, found.value.message) == (504, text)
    wait_until(lambda: not len(ends.guests), "removal of the request")
