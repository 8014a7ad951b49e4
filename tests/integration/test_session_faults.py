"""Sessions of agents while the broker is slow or full, agents are lost, and rows are delivered again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from broker.server import Server
from relax_actors.messages.generate import Refusal, SessionCall
from tests.support.running import wait_until
from tests.support.session_ends import ROW, handle, stopped


@pytest.mark.parametrize("kind", ["end", "keep", "show"])
def test_agent_whose_lease_ends_during_its_request_does_not_get_the_session_of_its_successor(
    make_sessions: Callable[..., Any], server: Server, kind: str
) -> None:
    with make_sessions(1) as (sessions, connection, _):
        lost = handle(connection, sessions, "take", lease=1.0).session
        (session, _) = sessions.book.sessions(ROW)
        with stopped(server):
            call = SessionCall(kind, lost, reward=0.25)
            late = asyncio.run_coroutine_threadsafe(sessions.handle(call), connection.loop)
            wait_until(lambda: session.attempt, "end of the lease")
        refused = late.result(20)
        assert (refused.refusal, refused.session) == (Refusal.ENDED, "")
        assert refused.detail == f"session {lost!r} is over: another agent has its sample, or it never existed"
        assert (session.attempt, session.state) == (1, None), "the sample waits for its next agent"


def test_sample_whose_lease_ends_while_it_is_given_out_is_given_to_one_agent(
    make_sessions: Callable[..., Any], server: Server
) -> None:
    with make_sessions(1) as (sessions, connection, _):
        (session, _) = sessions.book.sessions(ROW)
        with stopped(server):
            late = asyncio.run_coroutine_threadsafe(sessions.handle(SessionCall("take", lease=1.0)), connection.loop)
            wait_until(lambda: session.attempt, "end of the lease")
        given = {late.result(20).session, handle(connection, sessions, "take", lease=60.0).session}
        assert given == {"group-0-0-0-1", "group-0-0-1-0"}
        assert not handle(connection, sessions, "take").session


def test_agent_that_failed_does_not_get_the_session_of_its_successor(make_sessions: Callable[..., Any]) -> None:
    with make_sessions(1) as (sessions, connection, _):
        failed = handle(connection, sessions, "take", lease=60.0).session
        ended = handle(connection, sessions, "end", failed, error="the agent crashed")
        assert (ended.refusal, ended.session, ended.seconds) == ("", failed, 0.0)
        assert handle(connection, sessions, "take", lease=60.0).session == "group-0-0-0-1"
