"""Takes samples from the gateway of a run and runs the environment for each."""

from __future__ import annotations

import asyncio
import sys
import time

from relax_actors.serving.session_client import AgentResult, AgentTask, SessionClient, SessionGoneError
from relax_actors.serving.verifiers.example import VerifiersEnvironment, example_of

LEASE_SECONDS = 60.0
PAUSE_SECONDS = 0.5
"""Pause before samples are asked for again if none waits."""
SHOWN = 1000
"""Characters of an error."""


class Worker:
    """Runs samples until no more come.

    Args:
        environment: what runs them.
        client: of the gateway.
        concurrency: samples at once.
    """

    def __init__(self, environment: VerifiersEnvironment, client: SessionClient, concurrency: int) -> None:
        self._environment, self._client = environment, client
        self._slots = asyncio.Semaphore(concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self.done = self.failed = 0

    async def run(self, patience: float) -> None:
        """Work until no sample has come for `patience` seconds."""
        last = time.monotonic()
        try:
            while time.monotonic() - last < patience:
                async with self._slots:
                    taken = await self._client.take(LEASE_SECONDS)
                if taken is None:
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                last = time.monotonic()
                await self._slots.acquire()
                task = asyncio.ensure_future(self._work(taken))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await self._environment.close()

    async def _work(self, task: AgentTask) -> None:
        sample = asyncio.ensure_future(self._sample(task))
        keeping = asyncio.ensure_future(self._keep(task))
        try:
            await asyncio.wait({sample, keeping}, timeout=task.seconds, return_when=asyncio.FIRST_COMPLETED)
            if sample.done():
                result, error = sample.result()
                await self._client.end(task, result, error)
        except SessionGoneError:
            pass
        finally:
            keeping.cancel()
            sample.cancel()
            await asyncio.wait({sample, keeping})
            self.done += 1
            self._slots.release()

    async def _sample(self, task: AgentTask) -> tuple[AgentResult, str]:
        try:
            return await self._environment.run(example_of(self._environment, task), task), ""
        except Exception as error:  # noqa: BLE001 of this sample alone
            why = f"{type(error).__name__}: {error}"
            self.failed += 1
            sys.stderr.write(f"{task.session}: {why[:SHOWN]}\n")
            return AgentResult(), why

    async def _keep(self, task: AgentTask) -> None:
        """Keep the session; returns when it is over."""
        while True:
            await asyncio.sleep(LEASE_SECONDS / 4)
            try:
                await self._client.keep(task)
            except SessionGoneError:
                return
