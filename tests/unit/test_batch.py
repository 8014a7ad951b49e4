"""Requests that form a batch: which ones begin, and when they join."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.errors import EngineError
from relax_actors.generation.batch import JOIN_SHARE, JOIN_TOKENS, Batch, JoinPace, Kind, Samples, Ticket
from relax_actors.messages import FinishReason


def asking(tokens: int, samples: int = 1) -> GenerationRequest:
    """Ask for samples that need so many tokens at most, the prompt of one token included."""
    return GenerationRequest(np.ones(1, np.int32), 0, samples, 1.0, 1.0, tokens - 1, frozenset())


def batch_of(limit: int | None, cached: int | None = None, *, most_service: int = 64, alone: bool = False) -> Batch:
    return Batch(limit, cached, joins_freely=True, most_service=most_service, service_alone=alone)


def wait(batch: Batch, *tokens: int, kind: Kind = Kind.SERVICE, name: str = "") -> list[Future[Samples]]:
    tickets = [Ticket(asking(needed), kind, name) for needed in tokens]
    for ticket in tickets:
        batch.add(ticket)
    return [ticket.samples for ticket in tickets]


def sizes(requests: list[GenerationRequest]) -> list[int]:
    return [request.most_tokens for request in requests]


def end(batch: Batch, *numbers: int) -> None:
    empty = np.zeros(0, np.int32)
    batch.finish([(number, [Generation(empty, empty, empty, FinishReason.STOP)]) for number in numbers])


def test_many_requests_join_at_once_and_few_ones_together() -> None:
    pace = JoinPace(joins_freely=False)
    # One request for a batch of 16 waits; two are an eighth of it.
    assert [pace.step(1, 2 * JOIN_SHARE) for _ in range(JOIN_TOKENS)] == [False] * (JOIN_TOKENS - 1) + [True]
    assert pace.step(2, 2 * JOIN_SHARE)
    assert not pace.step(0, 1)
    assert JoinPace(joins_freely=True).step(1, 1000)


def test_service_requests_begin_while_all_requests_in_flight_fit_or_none_is_in_flight() -> None:
    batch = batch_of(130)
    wait(batch, 90, kind=Kind.ROW)
    first, second, third = wait(batch, 30, 40, 20)
    assert sizes(batch.begin(service=False)) == [90]
    assert batch.service_ready() == 1
    assert sizes(batch.join()) == [30]
    assert (batch.service_tokens, batch.service_ready(), batch.join()) == (30, 0, [])
    end(batch, 1)
    assert first.done()
    assert sizes(batch.join()) == [40]
    end(batch, 0, 2)
    assert second.done()
    assert sizes(batch.join()) == [20]
    batch.abandon()
    assert batch.service_tokens == 0
    with pytest.raises(EngineError, match="ended before the sample; send the request again"):
        third.result(0)


def test_the_first_service_request_begins_although_rows_leave_no_room() -> None:
    batch = batch_of(100)
    wait(batch, 90, kind=Kind.ROW)
    wait(batch, 30, 30)
    assert sizes(batch.begin()) == [90, 30]
    assert batch.join() == []


def test_no_more_service_requests_count_as_waiting_than_may_be_in_flight() -> None:
    batch = batch_of(None, most_service=2)
    wait(batch, *[10] * 5)
    assert batch.service_ready() == 2
    assert len(batch.begin()) == 2
    assert (batch.service_ready(), len(batch)) == (0, 3)


def test_a_service_request_of_a_deterministic_run_is_alone() -> None:
    batch = batch_of(None, alone=True)
    wait(batch, 10, 20)
    assert sizes(batch.begin()) == [10]
    assert batch.join() == []
    end(batch, 0)
    batch.abandon()
    wait(batch, 50, kind=Kind.ROW)
    assert sizes(batch.begin()) == [50]
    assert batch.join() == []


def test_service_requests_are_answered_in_batches_that_fit() -> None:
    batch, together = batch_of(60), list[int]()
    wait(batch, 20, 30, 200, 20, 20)
    while len(batch):
        together.append(len(batch.begin()))
        batch.abandon()
    assert together == [2, 1, 2]


def test_a_cancelled_request_never_begins() -> None:
    batch = batch_of(None)
    left, stays = wait(batch, 10, 20)
    assert left.cancel()
    assert (len(batch), batch.service_waiting) == (1, 1)
    assert sizes(batch.begin()) == [20]
    assert not stays.cancel()


def test_rows_join_at_once_and_turns_at_their_pace() -> None:
    batch = Batch(None, None, joins_freely=False)
    wait(batch, *[10] * 16, kind=Kind.ROW)
    assert len(batch.begin()) == 16
    wait(batch, 30, kind=Kind.TURN, name="a")
    assert [len(batch.join()) for _ in range(JOIN_TOKENS)] == [0] * (JOIN_TOKENS - 1) + [1]
    wait(batch, 40, kind=Kind.ROW)
    assert sizes(batch.join()) == [40]


def test_turns_and_service_requests_that_begin_together_fit() -> None:
    batch = batch_of(100)
    wait(batch, 40, kind=Kind.TURN, name="a")
    assert sizes(batch.begin()) == [40]
    wait(batch, 40)
    wait(batch, 40, kind=Kind.TURN, name="b")
    assert sizes(batch.begin()) == [40], "not the turn as well"


def test_what_fails_or_is_given_up_holds_no_room() -> None:
    batch = batch_of(100)
    wait(batch, 60, kind=Kind.TURN, name="a")
    batch.begin()
    batch.abandon()
    wait(batch, 60, kind=Kind.TURN, name="b")
    assert sizes(batch.begin()) == [60]
    end(batch, 0)
    batch.hold("b", 60)
    wait(batch, 70, kind=Kind.TURN, name="b")
    batch.forget_rows()
    wait(batch, 90, kind=Kind.TURN, name="c")
    assert sizes(batch.begin()) == [90]


def test_what_is_given_up_never_begins() -> None:
    batch = batch_of(None)
    wait(batch, 10, kind=Kind.TURN, name="a")
    wait(batch, 20, kind=Kind.ROW)
    wait(batch, 30)
    batch.forget_rows()
    assert sizes(batch.begin()) == [30]


def test_turns_and_service_requests_count_one_cache() -> None:
    batch = batch_of(None, 100)
    for number, name in enumerate("abc"):
        wait(batch, 20, kind=Kind.TURN, name=name)
        assert sizes(batch.begin()) == [20]
        end(batch, number)
        batch.hold(name, 20)  # its environment works: the engine does not, but its cache holds 20 tokens
    wait(batch, *[20] * 10)
    assert batch.service_ready() == 2
    assert len(batch.begin()) == 2, "60 tokens wait, 40 are free"
    wait(batch, 20, kind=Kind.TURN, name="d")
    assert batch.begin() == []
    batch.forget_rows()
    wait(batch, 20, kind=Kind.TURN, name="a")
    assert sizes(batch.begin()) == [20], "it has its place"
    wait(batch, 41, kind=Kind.TURN, name="b")
    assert batch.begin() == []


def test_a_turn_asks_for_one_sample() -> None:
    with pytest.raises(ValueError, match="TURN asks for 2 samples"):
        Ticket(asking(10, samples=2), Kind.TURN)
