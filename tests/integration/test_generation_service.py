"""Requests of the gateway to a rollout actor through the accounts of their users, on a real server."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from relax_actors.engines.protocols import Generation
from relax_actors.messages import FinishReason
from relax_actors.messages.generate import GenerateCall, Refusal
from relax_actors.serving.errors import ApiError
from tests.support.asked import answer
from tests.support.messages import assert_says
from tests.support.running import wait_until
from tests.support.service_ends import ServiceEnds

PROMPT = np.array([1, 2], np.int32)


def test_request_that_waits_longer_than_the_interval_of_signs_of_life_is_answered(ends: ServiceEnds) -> None:
    call = GenerateCall("slow", tokens=PROMPT, seconds=60)
    asking = asyncio.run_coroutine_threadsafe(ends.policy.generate(call), ends.connection.loop)
    (ticket,) = wait_until(lambda: ends.requests.take(1), "the request")
    with pytest.raises(TimeoutError):
        asking.result(1.0)  # ten signs of life
    answer(ticket, Generation(PROMPT, np.zeros(2, np.float32), np.zeros(2, np.int32), FinishReason.STOP))
    assert asking.result(10).tokens.tolist() == PROMPT.tolist()


def test_stop_tokens_of_a_request_end_its_answer(ends: ServiceEnds) -> None:
    call = GenerateCall("stops", PROMPT, stop_ids=[5], seconds=20)
    answering = asyncio.run_coroutine_threadsafe(ends.policy.generate(call), ends.connection.loop)
    (ticket,) = wait_until(lambda: ends.requests.take(1), "the request")
    assert ticket.request.stop_ids > {5}, "those of the tokenizer stay"
    tokens = np.array([4, 5], np.int32)
    answer(ticket, Generation(tokens, np.zeros(2, np.float32), tokens, FinishReason.STOP))
    assert answering.result(20).tokens.tolist() == [4, 5]
    unknown = GenerateCall("unknown", PROMPT, stop_ids=[1000], seconds=20)
    refused = ends.connection.call(ends.policy.generate(unknown), 20)
    assert_says(refused.detail, "stop token 1000", f"{ends.size} tokens")


def test_grammar_of_a_request_reaches_the_engine_and_alone_decides_the_end(ends: ServiceEnds) -> None:
    call = GenerateCall("held", PROMPT, grammar="start: /[0-9]/", seconds=20)
    answering = ends.begin(call)
    (ticket,) = wait_until(lambda: ends.requests.take(1), "the request")
    assert ticket.request.grammar == "start: /[0-9]/"
    # The service of these ends adds a stop token for rollout.stop, which could end a form in its middle.
    assert ticket.request.stop_ids == ends.stop_ids
    empty = np.zeros(0, np.int32)
    answer(ticket, Generation(empty, np.zeros(0, np.float32), empty, FinishReason.ERROR))
    failed = answering.result(20)
    assert failed.refusal == Refusal.INVALID
    assert "simplify the schema" in failed.detail
    ends.requests.refused = "the engine applies no grammars"
    refused = ends.connection.call(ends.policy.generate(GenerateCall("no", PROMPT, grammar="x", seconds=20)), 20)
    assert (refused.refusal, refused.detail) == (Refusal.INVALID, "the engine applies no grammars")


def test_request_that_waits_while_the_broker_is_killed_is_asked_again(ends: ServiceEnds) -> None:
    call = GenerateCall("cut off", tokens=PROMPT, seconds=60)
    asking = asyncio.run_coroutine_threadsafe(ends.policy.generate(call), ends.connection.loop)
    (first,) = wait_until(lambda: ends.requests.take(1), "the request")
    ends.broker.server.stop(0)
    ends.broker.start()
    (second,) = wait_until(lambda: ends.requests.take(1), "the request, again")
    assert wait_until(lambda: first.request.watch.is_cancelled, "end of the first one")
    assert second.request.tokens.tolist() == PROMPT.tolist()
    answer(second, Generation(PROMPT, np.zeros(2, np.float32), np.zeros(2, np.int32), FinishReason.STOP))
    assert asking.result(10).tokens.tolist() == PROMPT.tolist()


def test_request_that_the_engine_does_not_finish_is_refused_within_its_own_time(ends: ServiceEnds) -> None:
    with pytest.raises(ApiError) as found:
        ends.connection.call(ends.policy.generate(GenerateCall("late", tokens=PROMPT, seconds=0.5)), 10)
    text = "no rollout actor answered within 0.5 s; send the request again later"
    assert (found.value.status, found.value.message) == (504, text)
    wait_until(lambda: not len(ends.requests), "removal of the request")
