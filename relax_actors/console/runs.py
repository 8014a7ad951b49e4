"""The runs that one console shows: the one that it was opened for, and those beside it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from relax_actors.console.errors import RequestError
from relax_actors.console.run import STARTS, ConsoleRun, runs_beside
from relax_actors.errors import RelaxError
from relax_actors.monitoring.access import Access

MAX_OPEN = 16
IDLE_LOOK_SECONDS = 5.0


class ConsoleRuns:
    """Runs by name; another run than the first is opened when it is first asked for.

    Args:
        run: name or folder of the first run.
        access: options that replace the recorded address and credentials of the first run's broker.

    Raises:
        ConfigError: no such run.
    """

    def __init__(self, run: str, access: Access | None = None) -> None:
        own = ConsoleRun(run, access)
        self.first, self.folder = own.name, own.folder
        self._runs = {own.name: own}
        self._beside = str(own.folder.root.resolve().parent)

    def names(self) -> tuple[str, ...]:
        """Return the names of all runs, that of the first run first."""
        return tuple(dict.fromkeys([self.first, *(path.rpartition("/")[2] for path in runs_beside(self._beside))]))

    async def get(self, name: str) -> ConsoleRun:
        """Return a run, the first one for an empty name; raises RequestError if there is none, or too many are open."""
        name = name or self.first
        if name not in self._runs:
            if name not in self.names():
                msg = f"there is no run {name[:80]!r} beside {self.first}"
                raise RequestError(404, msg, "unknown_run")
            if len(self._runs) >= MAX_OPEN:
                msg = f"{MAX_OPEN} runs are open already; start another console"
                raise RequestError(409, msg, "too_many_runs")
            self._runs[name] = ConsoleRun(f"{self._beside}/{name}")
        return self._runs[name]

    async def read_ahead(self) -> None:
        """Read the first run while a browser loads the page.

        A run that is over is not read: that would start its broker.
        """
        STARTS.set(False)
        with suppress(RelaxError):  # the next request reports the error
            await self._runs[self.first].read_ahead()

    async def watch(self) -> None:
        """Release runs that are over and that nobody looks at; runs until it is cancelled."""
        while True:
            await asyncio.sleep(IDLE_LOOK_SECONDS)
            for run in list(self._runs.values()):
                with suppress(RelaxError):
                    await run.release_if_idle()

    async def close(self) -> None:
        """Close all runs."""
        for run in self._runs.values():
            with suppress(RelaxError):
                await run.close()
