"""Tasksets and environments of `verifiers.v1`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from relax_actors.serving.session_client import AgentResult, AgentTask
from relax_actors.serving.verifiers.example import Example, VerifiersError

SAMPLES_TOGETHER = 64
"""Samples of one serving environment, which keeps an HTTP client for each session until it ends."""


class TasksetEnvironment:
    """A taskset with the environment and the harness that verifiers chooses for it.

    An agent without a harness of its own runs in this process, see `chat_harness`; the default of verifiers starts
    programs in a sandbox that costs money. Likewise its default runtime becomes a local process.

    Args:
        name: id of the taskset, as verifiers takes it.
        options: fields of the environment's config: `taskset`, `timeout`, and those of each agent.

    Raises:
        VerifiersError: several agents would play with the policy.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        register()
        self._config, self._agent = _config(name, options)
        self._tasks: list[Any] = []
        self._serving: _Serving | None = None
        self._rest = self._stream()

    def _stream(self) -> Iterator[Any]:
        from verifiers.v1 import load_environment  # noqa: PLC0415 absent where the run is

        return iter(load_environment(self._config).taskset)

    def examples(self, split: str) -> Iterator[Example]:
        """Yield the tasks of the taskset; raises VerifiersError if `split` is not "train"."""
        if split != "train":
            msg = f"a taskset has one stream of tasks, no split {split!r}; divide the file that --rows writes"
            raise VerifiersError(msg)
        return (_example(task) for task in self._stream())

    def example(self, split: str, index: int) -> Example | None:
        """Return a task, None if there are fewer or `split` is not "train"."""
        while len(self._tasks) <= index and (task := next(self._rest, None)) is not None:
            self._tasks.append(task)
        return _example(self._tasks[index]) if split == "train" and index < len(self._tasks) else None

    async def run(self, example: Example, task: AgentTask) -> AgentResult:
        """Run and score an episode whose agent asks the session; raises VerifiersError if it failed."""
        from verifiers.v1 import EvalClientConfig, ModelContext  # noqa: PLC0415

        variable = f"RELAX_SESSION_{task.session}"
        os.environ[variable] = task.api_key  # verifiers takes keys from nowhere else
        try:
            client = EvalClientConfig(base_url=task.base_url, api_key_var=variable)
            async with self._served() as environment:
                episode = await environment.run_episode(example.value, ModelContext(model="policy", client=client))
        finally:
            del os.environ[variable]
        traces = [trace for trace in episode.traces if trace.agent.name in ("", self._agent)]
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        if not episode.ok:
            raise VerifiersError("; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason given")
        if len(traces) != 1:
            msg = f"agent {self._agent!r} has played {len(traces)} times in an episode, and a sample has one reward"
            raise VerifiersError(msg)
        (trace,) = traces
        metrics = trace.metrics | {name: reward and reward.value for name, reward in trace.rewards.items()}
        return AgentResult(
            float(trace.reward), {name: float(value) for name, value in metrics.items() if value is not None}
        )

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[Any]:
        """A serving environment; a new one after `SAMPLES_TOGETHER` samples."""
        if self._serving is None or self._serving.is_full:
            self._serving = _Serving(self._config)
        async with self._serving.sample() as environment:
            yield environment

    async def close(self) -> None:
        """Stop the servers of the environment."""
        if self._serving is not None:
            await self._serving.close()


class _Serving:
    """An environment with its servers; ends when it is full and its last sample has ended."""

    def __init__(self, config: Any) -> None:
        self._config, self._begun, self._running = config, 0, 0
        self._over = asyncio.Event()
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # Entered and left by one task, as the servers of MCP demand.
        self._task = asyncio.ensure_future(self._serve())

    @property
    def is_full(self) -> bool:
        """Whether it takes no more samples."""
        return self._begun >= SAMPLES_TOGETHER or (self._ready.done() and self._ready.exception() is not None)

    async def _serve(self) -> None:
        from verifiers.v1 import load_environment  # noqa: PLC0415

        try:
            environment = load_environment(self._config)
            async with environment.serving():
                self._ready.set_result(environment)
                await self._over.wait()
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    @asynccontextmanager
    async def sample(self) -> AsyncIterator[Any]:
        """The environment, as soon as it serves."""
        self._begun, self._running = self._begun + 1, self._running + 1
        try:
            yield await asyncio.shield(self._ready)
        finally:
            self._running -= 1
            if self.is_full and not self._running:
                self._over.set()

    async def close(self) -> None:
        """Stop the servers."""
        self._over.set()
        await self._task


def _config(name: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Config of the environment, and the name of the agent that plays with the policy."""
    import verifiers.v1 as vf  # noqa: PLC0415
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type  # noqa: PLC0415

    fields = env_config_type(name, options.get("id", "")).model_fields
    defaults = {agent: field.default for agent, field in fields.items() if isinstance(field.default, vf.AgentConfig)}
    config = options | {"taskset": {**options.get("taskset", {}), "id": name}}
    for agent, default in defaults.items():
        own = {"runtime": {"type": "subprocess"}}
        if default.harness is None and default_harness_id(name) != name:
            own["harness"] = {"id": HARNESS}
        config[agent] = own | options.get(agent, {})
    players = [agent for agent, default in defaults.items() if default.client is None and "client" not in config[agent]]
    if len(players) != 1:
        msg = (
            f"the policy plays {len(players)} agents of {name!r} ({', '.join(players) or 'none'}), and a sample has "
            "one reward; give the other agents a client of their own in --args"
        )
        raise VerifiersError(msg)
    return env_config_type(name, options.get("id", "")).model_validate(config), players[0]


def _example(task: Any) -> Example:
    data = task.data.model_dump(mode="json", exclude_none=True)
    prompt = data.get("prompt")
    if prompt and data.get("system_prompt"):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt = [{"role": "system", "content": data["system_prompt"]}, *messages]
    return Example(task, prompt, str(data.get("answer", "")))


HARNESS = "relax_chat"
"""Its id. verifiers imports a module of this name."""
RETRIES = 10


def register() -> None:
    """Let verifiers find the harness."""
    if HARNESS not in sys.modules:
        module = ModuleType(HARNESS)
        module.__dict__.update(ChatHarness=_harness_class(), __all__=["ChatHarness"])
        sys.modules[HARNESS] = module


def _harness_class() -> type:
    import verifiers.v1 as vf  # noqa: PLC0415 absent where the run is
    from openai import AsyncOpenAI  # noqa: PLC0415
    from verifiers.v1.dialects.chat import message_to_wire  # noqa: PLC0415

    class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        """Sends the conversation, and yields at the answer. Tools belong to other harnesses."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages: Any = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or ()]
            async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=RETRIES) as client:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            return vf.ProgramResult(0, "", "")

    return ChatHarness
