"""Base of the actors of a process: pykka actors with futures that asyncio awaits.

Invariant: every request gets an answer. pykka ends all actors of the process without an answer when one of them raises
`SystemExit`, so that it becomes an error like any other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import pykka

from relax_actors.runtime.context import Context

T = TypeVar("T")


class ExitRequestedError(Exception):
    """A handler called `sys.exit` or was interrupted; the process ends as crashed."""


class Answer(pykka.ThreadingFuture[T]):
    """Future of pykka that asyncio awaits without blocking its loop."""

    def __init__(self) -> None:
        super().__init__()
        self._settled: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Running futures cannot be cancelled: an actor sets its answer also after the task that awaits it has ended.
        self._settled.set_running_or_notify_cancel()

    @property
    def is_settled(self) -> bool:
        """Whether `get` returns or raises at once."""
        return self._settled.done()

    def set(self, value: T | None = None) -> None:
        """Set the value; called by the actor."""
        super().set(value)
        self._settled.set_result(None)

    def set_exception(self, exc_info: Any = None) -> None:
        """Set the exception, by default the current one; called by the actor."""
        super().set_exception(exc_info)
        self._settled.set_result(None)

    def __await__(self) -> Generator[Any, None, T]:
        """Return the value, or raise the exception."""
        yield from asyncio.wrap_future(self._settled).__await__()
        result: T = self.get()
        return result


class Actor(pykka.ThreadingActor):
    """Actor with a thread of its own, which ends with the process.

    An exception that no caller waits for, of a message that was sent with `tell`, ends the process as crashed.

    Attributes:
        name: name of the thread.
    """

    use_daemon_thread = True
    name: ClassVar[str]

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context

    @staticmethod
    def _create_future() -> Answer[Any]:
        return Answer()

    def _handle_receive(self, message: Any) -> Any:
        try:
            return super()._handle_receive(message)
        except Exception:
            raise
        except BaseException as error:
            msg = f"handler raised {type(error).__name__}({error})"
            raise ExitRequestedError(msg) from error

    def on_start(self) -> None:
        """Name the thread."""
        threading.current_thread().name = self.name

    def on_failure(
        self,
        exception_type: type[BaseException] | None,  # noqa: ARG002 pykka's interface
        exception_value: BaseException | None,
        traceback: TracebackType | None,  # noqa: ARG002 pykka's interface
    ) -> None:
        """End the process as crashed, with the exception as the reason."""
        if exception_value is not None:
            self.context.fail(exception_value)

    def tell_later(self, seconds: float, message: Any) -> None:
        """Send a message to this actor in some seconds, if it is alive then."""
        loop = self.context.table.connection.loop
        with suppress(RuntimeError):  # the loop is closed at the very end of a process
            loop.call_soon_threadsafe(loop.call_later, seconds, self._tell, message)

    def _tell(self, message: Any) -> None:
        with suppress(pykka.ActorDeadError):
            self.actor_ref.tell(message)
