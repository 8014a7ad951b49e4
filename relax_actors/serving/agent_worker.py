"""Works on samples: takes them from the gateway, runs an agent for each, and ends them.

Programs in a Python environment without the run's packages use it, too, so it imports `session_client` alone.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from relax_actors.serving.session_client import AgentResult, AgentTask, SessionClient, SessionGoneError

IDLE_SECONDS, MAX_IDLE_SECONDS = 0.05, 1.0
"""Pause before samples are asked for again, doubled while none waits."""
STUCK_SECONDS = 30.0
"""Time that an agent has to end after it was cancelled."""


class AgentStuckError(Exception):
    """An agent did not end when it was cancelled."""


class AgentWorker:
    """Runs up to `concurrency` agents at once; counts samples that ended (`done`) and `failed`.

    If the agent raises, the sample has failed, and `on_failure` is called with it and the text of the error. After
    `lease` seconds without a sign of life a sample is given to another worker.
    """

    def __init__(
        self,
        client: SessionClient,
        agent: Callable[[AgentTask], Awaitable[AgentResult]],
        concurrency: int,
        lease: float,
        on_failure: Callable[[AgentTask, str], None] = lambda *_: None,
    ) -> None:
        self._client, self._agent, self._lease, self._on_failure = client, agent, lease, on_failure
        self._places = asyncio.Semaphore(concurrency)
        self.done = self.failed = 0

    async def run(self, patience: float = math.inf) -> None:
        """Work until no sample has come for `patience` seconds. Cancelled, it cancels the agents.

        Raises:
            AgentStuckError: an agent blocks its event loop or ignores that it was cancelled.
        """
        try:
            async with asyncio.TaskGroup() as agents:
                await self._run(agents, patience)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run(self, agents: asyncio.TaskGroup, patience: float) -> None:
        last, pause = time.monotonic(), IDLE_SECONDS
        while time.monotonic() - last < patience:
            async with self._places:
                taken = await self._client.take(self._lease)
            if taken is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_IDLE_SECONDS)
                continue
            last, pause = time.monotonic(), IDLE_SECONDS
            await self._places.acquire()
            agents.create_task(self._work(taken)).add_done_callback(lambda _: self._places.release())

    async def _work(self, task: AgentTask) -> None:
        agent, keeping = asyncio.ensure_future(self._agent(task)), asyncio.ensure_future(self._keep(task))
        try:
            await asyncio.wait({agent, keeping}, timeout=task.seconds + 1, return_when=asyncio.FIRST_COMPLETED)
            if agent.done():
                await self._end(task, agent)
        except SessionGoneError:
            pass
        finally:
            keeping.cancel()
            agent.cancel()
            await asyncio.wait({agent, keeping}, timeout=STUCK_SECONDS)
            self.done += 1
        if not agent.done():
            msg = f"the agent of session {task.session} did not end within {STUCK_SECONDS:g} s of its end"
            raise AgentStuckError(msg)

    async def _end(self, task: AgentTask, agent: asyncio.Future[AgentResult]) -> None:
        try:
            await self._client.end(task, agent.result())
        except SessionGoneError:
            raise
        except Exception as error:  # noqa: BLE001 of this agent alone
            why = f"{type(error).__name__}: {error}"
            self.failed += 1
            self._on_failure(task, why)
            await self._client.end(task, AgentResult(), why)

    async def _keep(self, task: AgentTask) -> None:
        """Keep the session while the agent lives; returns when the session is over."""
        while True:
            await asyncio.sleep(self._lease / 3)
            try:
                await self._client.keep(task)
            except SessionGoneError:
                return
