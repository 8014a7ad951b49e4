"""Actors answer every request, whatever their handlers raise, and asyncio awaits the answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pykka
import pytest

from relax_actors.runtime.actor import Actor, ExitRequestedError
from relax_actors.runtime.context import Context


class Calls(Actor):
    """Raises the exceptions that it is sent, and returns all other messages."""

    name = "calls"

    def on_receive(self, message: Any) -> Any:
        if isinstance(message, BaseException):
            raise message
        return threading.current_thread().name if message == "thread" else message


@pytest.fixture
def failed() -> list[BaseException]:
    return []


@pytest.fixture
def calls(failed: list[BaseException]) -> Iterator[pykka.ActorRef[Calls]]:
    actor = Calls.start(cast("Context", SimpleNamespace(fail=failed.append)))
    yield actor
    actor.stop(timeout=10)


async def asked(actor: pykka.ActorRef[Calls], message: Any) -> Any:
    return await asyncio.wait_for(actor.ask(message, block=False), 10)


def test_answers_are_awaited(calls: pykka.ActorRef[Calls]) -> None:
    assert asyncio.run(asked(calls, 3)) == 3
    assert asyncio.run(asked(calls, "thread")) == "calls"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
def test_request_to_exit_is_answered_and_ends_no_actor(calls: pykka.ActorRef[Calls], error: BaseException) -> None:
    with pytest.raises(ExitRequestedError, match=type(error).__name__) as raised:
        asyncio.run(asked(calls, error))
    assert raised.value.__cause__ is error
    assert asyncio.run(asked(calls, "next")) == "next"


@pytest.mark.parametrize(("error", "seen"), [(ValueError("bad"), ValueError), (StopIteration(), RuntimeError)])
def test_exceptions_reach_the_caller(calls: pykka.ActorRef[Calls], error: Exception, seen: type[Exception]) -> None:
    with pytest.raises(seen):
        asyncio.run(asked(calls, error))


def test_answer_to_a_caller_that_has_given_up_ends_no_actor(calls: pykka.ActorRef[Calls]) -> None:
    class Slow(Calls):
        def on_receive(self, message: Any) -> Any:
            message.wait(10)

    slow, given_up = Slow.start(cast("Context", SimpleNamespace())), threading.Event()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slow.ask(given_up, block=False), 0.01)

    asyncio.run(give_up())
    given_up.set()
    assert asyncio.run(asked(slow, given_up)) is None
    slow.stop(timeout=10)


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(1)])
def test_exception_that_nobody_waits_for_ends_the_process(
    calls: pykka.ActorRef[Calls], failed: list[BaseException], error: BaseException
) -> None:
    calls.tell(error)
    calls.actor_stopped.wait(10)
    with pytest.raises(pykka.ActorDeadError):
        asyncio.run(asked(calls, 1))
    assert [one.__cause__ or one for one in failed] == [error]


def test_requests_to_a_stopped_actor_are_refused(calls: pykka.ActorRef[Calls]) -> None:
    calls.stop(timeout=10)
    with pytest.raises(pykka.ActorDeadError):
        asyncio.run(asked(calls, 1))
