"""The role's thread: a pykka actor that runs the pump's requests one at a time.

Invariant: every request gets an answer. pykka stops all actors of the process without an answer when one of them raises
`SystemExit`, so `ask` turns every outcome into an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pykka


class ExitRequestedError(Exception):
    """A handler called `sys.exit` or was interrupted; the process ends as crashed."""


class Mailbox(pykka.ThreadingActor):
    """Runs callables in one thread, in order of arrival."""

    use_daemon_thread = True

    def on_receive(self, message: Any) -> Any:
        """Run the callable; `ask` has wrapped it so that it does not raise."""
        return message()


async def ask(ref: pykka.ActorRef[Mailbox], work: Callable[[], Any]) -> Any:
    """Run `work` in the mailbox's thread; await its result, or raise its exception."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def call() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = work()
        except (SystemExit, KeyboardInterrupt) as raised:
            error = ExitRequestedError(f"handler raised {type(raised).__name__}({raised})")
            error.__cause__ = raised
        except BaseException as raised:  # noqa: BLE001 handed to the caller
            error = raised
        loop.call_soon_threadsafe(settle, result, error)

    ref.tell(call)
    return await answer
