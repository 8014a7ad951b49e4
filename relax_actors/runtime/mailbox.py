"""The role's thread: a pykka actor whose inbox the pump feeds, one request at a time.

pykka stops every actor of the process without an answer when one raises `SystemExit`, so every outcome of a handler is
turned into an answer here.
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


def thread_stack(thread_id: int | None) -> str:
    """Where a thread is now, as text."""
    frame = sys._current_frames().get(thread_id or -1)  # noqa: SLF001 the only way to look at another thread
    return "".join(traceback.format_stack(frame)) if frame else "(no such thread)"
