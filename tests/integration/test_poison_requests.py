"""A request with which rollout actors die is given up, before the rows beside it are."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from broker.subjects import RowId
from relax_actors.engines.protocols import Generation
from relax_actors.generation.batch import Ticket
from relax_actors.messages import FinishReason
from relax_actors.messages.generate import GenerateAnswer, GenerateCall
from relax_actors.serving.errors import ApiError
from tests.support.asked import answer
from tests.support.running import wait_until
from tests.support.service_ends import ServiceEnds

PROMPT = np.array([1, 2], np.int32)


def next_ticket(ends: ServiceEnds) -> Ticket:
    (ticket, *more) = wait_until(lambda: ends.requests.take(8), "a request")
    assert not more, "suspects are sent one at a time"
    return ticket


def refused(asking: Future[GenerateAnswer]) -> ApiError:
    with pytest.raises(ApiError) as found:
        asking.result(20)
    return found.value


def test_request_with_which_two_actors_died_is_not_sent_to_a_third(ends: ServiceEnds) -> None:
    calls = [GenerateCall(f"call {n}", PROMPT + n, seconds=60) for n in range(2)]
    asking = [ends.begin(call) for call in calls]
    wait_until(lambda: len(ends.requests) == 2, "both requests")
    ends.start(2)
    poison = int(next_ticket(ends).request.tokens[0] - PROMPT[0])
    ends.start(3)
    ticket = next_ticket(ends)
    assert int(ticket.request.tokens[0] - PROMPT[0]) == 1 - poison
    answer(ticket, Generation(PROMPT, np.zeros(2, np.float32), np.zeros(2, np.int32), FinishReason.STOP))
    assert asking[1 - poison].result(20).tokens.tolist() == PROMPT.tolist()
    error = refused(asking[poison])
    assert (error.status, error.code, error.retry_after) == (422, "request_killed_actors", None)
    assert "2 actors have died" in error.message
    assert refused(ends.begin(replace(calls[poison], call="repeated"))).code == "request_killed_actors"
    assert not len(ends.requests)


@pytest.mark.parametrize("external", [False, True])
def test_request_of_a_session_is_not_blamed_for_kills_from_outside(ends: ServiceEnds, external: bool) -> None:  # noqa: FBT001
    row = RowId(0, 0)
    ends.put_prompt(row)
    asking = ends.begin(GenerateCall("in a session", session="group-0-0-0-0", seconds=60))
    for incarnation in (2, 3):
        wait_until(lambda: ends.sessions.calls, "the request")
        ends.count_failure(row, external=external)
        ends.start(incarnation)
    if external:
        wait_until(lambda: ends.sessions.calls, "the request, once more")
        asking.cancel()
    else:
        assert refused(asking).code == "request_killed_actors"
        assert not ends.sessions.calls
