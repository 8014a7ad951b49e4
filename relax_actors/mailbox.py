"""The role's thread: a pykka actor whose inbox the pump feeds, one request at a time.

pykka lets an actor live through an exception in an `ask` and gives it to the caller; `SystemExit` would stop every actor
of the process without an answer, so it is turned into an answer here.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pykka


class ExitRequestedError(Exception):
    """A handler called `sys.exit` or was interrupted; the process must end as if it had crashed."""


class Mailbox(pykka.ThreadingActor):
    """Runs callables in one thread, in order."""

    use_daemon_thread = True

    def on_receive(self, message: Any) -> Any:
        """Call what came; `ask` below has wrapped it so that it raises nothing."""
        return message()


async def ask(ref: pykka.ActorRef[Mailbox], work: Callable[[], Any]) -> Any:
    """Run `work` in the mailbox's thread and await its result."""
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
        try:
            result, error = work(), None
        except (SystemExit, KeyboardInterrupt) as exit_:
            result, error = None, ExitRequestedError(f"handler raised {type(exit_).__name__}({exit_})")
            error.__cause__ = exit_
        except BaseException as raised:  # noqa: BLE001 handed to the caller
            result, error = None, raised
        loop.call_soon_threadsafe(settle, result, error)

    ref.tell(call)  # type: ignore[arg-type]
    return await answer


def stack_of(thread_id: int | None) -> str:
    """Where a thread is now, as text."""
    frame = sys._current_frames().get(thread_id or -1)  # noqa: SLF001 the only way to look at another thread
    return "".join(traceback.format_stack(frame)) if frame else "(no such thread)"
