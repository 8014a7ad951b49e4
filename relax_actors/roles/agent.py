"""Role `agent`: runs an agent for each sample that a rollout actor offers."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ClassVar

from relax_actors.config.gateway import AgentSection
from relax_actors.data.checked_run import CheckedRun
from relax_actors.errors import ConfigError
from relax_actors.registry import dotted
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.runtime.service_role import ServiceRole
from relax_actors.serving.agent_process import AgentError, Program
from relax_actors.serving.agent_worker import IDLE_SECONDS, AgentWorker
from relax_actors.serving.session_client import AgentResult, AgentTask, SessionClient

GATEWAY_SECONDS = 120.0


class AgentRole(ServiceRole):
    """Takes samples from the gateway, runs the agent for each, and sends its result."""

    spec: ClassVar = RoleSpec(section="agent", requires="local_agent", start_order=70)

    def check(self, run: CheckedRun) -> Iterator[str]:
        """Check that the agent's program or function and its token are on this machine."""
        section = run.config.agent or AgentSection()
        if "agent" not in run.here:
            return
        _found(section)
        if (path := section.gateway_token_file) is not None and not path.is_file():
            msg = f"agent.gateway_token_file {path} does not exist; copy a token of that gateway to it, of mode 600"
            raise ConfigError(msg)
        yield from ()

    def setup(self) -> None:
        """Find the agent and the gateway; raises ConfigError."""
        self._section = section = self.context.config.agent or AgentSection()
        self._program, self._function = _found(section)
        self._folder = self.context.folder.root / "agents"
        self._worker: AgentWorker | None = None
        # Of its own, so that a function that blocks does not stop the signs of life of this process.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()

    async def start(self) -> None:
        """Begin to take samples."""
        self._running = asyncio.ensure_future(self._run())
        self._running.add_done_callback(self._on_end)

    def _on_end(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            self.fail(error)

    async def stop(self) -> None:
        """Kill the agents; their samples are given to others."""
        self._running.cancel()
        await asyncio.wait({self._running}, timeout=3)

    def handled(self) -> int:
        """Return the number of agents that have ended."""
        return 0 if self._worker is None else self._worker.done

    async def _run(self) -> None:
        client = SessionClient(*await self._gateway())
        self._worker = AgentWorker(client, self._agent, self._section.concurrency, self._section.lease_seconds)
        try:
            await self._worker.run()
        finally:
            await client.close()

    async def _gateway(self) -> tuple[str, str]:
        """Return address and token of the gateway, as soon as it has written them."""
        section = self._section
        if section.gateway_url and section.gateway_token_file is not None:
            return section.gateway_url, section.gateway_token_file.read_text().split()[0]
        folder = self.context.config.folder / "gateway"
        own = self.context.config.gateway
        token = folder / "token" if own is None or own.token_file is None else own.token_file
        for _ in range(int(GATEWAY_SECONDS / IDLE_SECONDS)):
            if (folder / "url.0").exists() and token.exists():
                return (folder / "url.0").read_text(), token.read_text().split()[0]
            await asyncio.sleep(IDLE_SECONDS)
        msg = (
            f"no gateway has written its address to {folder} within {GATEWAY_SECONDS:g} s; on another machine set "
            "agent.gateway_url and agent.gateway_token_file"
        )
        raise ConfigError(msg)

    async def _agent(self, task: AgentTask) -> AgentResult:
        if self._function is not None:
            work = asyncio.run_coroutine_threadsafe(_call(self._function, task), self._loop)
            return await asyncio.wrap_future(work)
        folder = self._folder / task.session
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return await self._program.run(task, folder)


def _found(section: AgentSection) -> tuple[Program, Callable[[AgentTask], Awaitable[Any]] | None]:
    """Return an agent's program and its function, if it is one; raises ConfigError."""
    program = Program(section.command, section.cwd, section.environment, section.max_output_bytes)
    if not section.command:
        return program, load_function(section.function)
    program.check()
    return program, None


def load_function(path: str) -> Callable[[AgentTask], Awaitable[Any]]:
    """Return the coroutine function of a dotted path; raises ConfigError."""
    function = dotted.load(path, "agent.function")
    if not inspect.iscoroutinefunction(function):
        msg = f"agent.function {path!r} is no coroutine function; write `async def`"
        raise ConfigError(msg)
    return function


async def _call(function: Callable[[AgentTask], Awaitable[Any]], task: AgentTask) -> AgentResult:
    result = await function(task)
    if isinstance(result, AgentResult):
        return result
    if result is None or (isinstance(result, int | float) and not isinstance(result, bool)):
        return AgentResult(None if result is None else float(result))
    msg = f"agent.function returned a {type(result).__name__}; return a reward, an AgentResult or None"
    raise AgentError(msg)
