"""Base class of roles that handle no rows, and the pump of their actors."""

from __future__ import annotations

import asyncio

from relax_actors.runtime.pump import Pump
from relax_actors.runtime.role import Role


class ServiceRole(Role):
    """Role without rows: it answers requests of other actors, or of programs.

    `setup` runs first, then `start`; when the actor is asked to stop, `stop`, then `close`. `setup` and `close` run in
    the role's thread; `start` and `stop` run in the event loop's thread and must not block. An exception of any of them
    ends the process, and the supervisor restarts it.
    """

    _ended: asyncio.Future[None]

    async def start(self) -> None:
        """Begin to serve; return as soon as requests are accepted."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop serving. Called also after `fail`."""

    def handled(self) -> int:
        """Return the number of requests answered so far, which the actor publishes as `rows`."""
        return 0

    def fail(self, error: BaseException) -> None:
        """End the process as crashed, by an error of a background task, in the event loop."""
        if not self._ended.done():
            self._ended.set_exception(error)


class ServicePump(Pump[None]):
    """Pump of one actor of a `ServiceRole`."""

    def __init__(self, role: ServiceRole) -> None:
        self._role = role
        self._ended = role._ended = asyncio.get_running_loop().create_future()  # noqa: SLF001 set here, so that subclasses need no constructor

    @property
    def handled(self) -> int:
        """Requests answered so far."""
        return self._role.handled()

    def wake(self) -> None:
        """Make `fetch` return."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def open(self) -> None:
        """Begin to serve."""
        await self._role.start()

    async def fetch(self) -> None:
        """Wait until the actor is asked to stop; raise the error if the role fails."""
        await self._ended

    async def close(self) -> None:
        """Stop serving."""
        await self._role.stop()
