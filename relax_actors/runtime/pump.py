"""The loop of every actor, between the broker and the thread of its role.

`PoolPump` hands out rows, `FollowerPump` cells in stream order; `ServicePump` waits while the role answers requests.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

Work = TypeVar("Work")


class Pump(ABC, Generic[Work]):
    """Fetches work and has the role do it, until the actor is asked to stop.

    All methods run in the event loop's thread. An exception ends the process as crashed.
    """

    async def run(self, stopping: asyncio.Event) -> None:
        """Pump until `stopping` is set; the work that was fetched before is finished."""
        try:
            await self.open()
            while not stopping.is_set():
                work = await self.fetch()
                if work is not None:
                    await self.handle(work)
                elif not stopping.is_set():
                    await self.idle()
        finally:
            await self.close()

    @property
    @abstractmethod
    def handled(self) -> int:
        """Rows, cells or requests handled so far."""

    @abstractmethod
    def wake(self) -> None:
        """Make `fetch` return at once, because the actor was asked to stop."""

    async def give_back(self) -> list[str] | None:
        """Return the work in hand to others, because the process is about to be killed.

        Returns:
            Names of the rows; None if nobody else may have the work, and the actor stops by itself.
        """
        return None

    async def open(self) -> None:
        """Begin. Called once, before all others."""

    @abstractmethod
    async def fetch(self) -> Work | None:
        """Wait a limited time for work; None if there is none."""

    async def handle(self, work: Work) -> None:
        """Have the role do what was fetched."""

    async def idle(self) -> None:
        """Do what is left for times without work."""

    async def close(self) -> None:
        """Give back what was fetched and not handled. Called once, also after an exception."""
