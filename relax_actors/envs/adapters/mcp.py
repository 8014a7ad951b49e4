"""Environment `mcp`: tools of Model Context Protocol servers, over HTTP or stdio."""

from __future__ import annotations

import asyncio
import base64
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from relax_actors.envs.tools.environment import ToolEnvironment
from relax_actors.envs.tools.functions import Tool, ToolError, tools_of
from relax_actors.errors import ConfigError
from relax_actors.registry.dotted import import_extra

SETTING = "environment.name = 'mcp'"
OPEN_SECONDS = 30.0


class McpTool(Tool):
    """Tool of an MCP server."""

    def __init__(self, client: Any, described: Any) -> None:
        self.name, self._client = described.name, client
        function = {
            "name": described.name,
            "description": described.description or "",
            "parameters": described.input_schema,
        }
        self.schema = {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the tool; return its texts, or parts with images; raises ToolError."""
        try:
            result = await self._client.call_tool(self.name, dict(arguments))
        except Exception as error:
            msg = f"{self.name}: {type(error).__name__}: {error}"
            raise ToolError(msg) from error
        parts = [_part(block) for block in result.content]
        texts = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if result.is_error:
            raise ToolError(texts or f"{self.name} failed")
        return texts if all(part["type"] == "text" for part in parts) else parts


class McpEnvironment(ToolEnvironment):
    """Gives the model the tools of MCP servers. Each episode has connections of its own.

    A server that keeps a state is not brought back to it by a replay, unless the calls themselves do so.

    Attributes:
        servers: URLs of servers with streamable HTTP, e.g. "http://127.0.0.1:8000/mcp", or command lines of servers
            that speak over standard input and output.
        allow: names of the tools to offer; all if empty.
    """

    servers: tuple[str, ...]
    allow: tuple[str, ...] = ()

    _stack: AsyncExitStack

    @classmethod
    def tool_schemas(cls, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Ask the servers for their tools; raises ConfigError for no answer or equal names."""

        async def ask() -> list[dict[str, Any]]:
            async with AsyncExitStack() as stack:
                tools = await _connect(stack, options["servers"], options["allow"])
                return [tool.schema for tool in tools]

        return asyncio.run(ask())

    async def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> Any:
        """Connect to the servers."""
        self._stack = AsyncExitStack()
        self._connected = await _connect(self._stack, self.servers, self.allow)
        return super().reset(task, rng)

    def make_tools(self) -> Sequence[Callable[..., Any] | Tool]:
        """Return the servers' tools."""
        return self._connected

    async def close(self) -> None:
        """Disconnect."""
        await self._stack.aclose()


async def _connect(stack: AsyncExitStack, servers: Sequence[str], allow: Sequence[str]) -> list[Tool]:
    """Connect to servers and return their tools."""
    client = import_extra("mcp.client", "mcp", SETTING)
    parameters = import_extra("mcp.client.stdio", "mcp", SETTING).StdioServerParameters
    tools: list[Tool] = []
    for server in servers:
        if server.startswith(("http://", "https://")):
            target: Any = server
        else:
            command, *arguments = shlex.split(server)
            target = parameters(command=command, args=arguments, env=dict(os.environ))
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                connected = await stack.enter_async_context(client.Client(target))
                listed = await connected.list_tools()
        except Exception as error:
            msg = f"environment.options.servers: {server!r} does not answer: {_cause(error)}; start it, or correct it"
            raise ConfigError(msg) from error
        tools += [McpTool(connected, tool) for tool in listed.tools if not allow or tool.name in allow]
    if unknown := sorted(set(allow) - {tool.name for tool in tools}):
        msg = f"environment.options.allow names {unknown[0]!r}, which no server has"
        raise ConfigError(msg)
    return list(tools_of(tools).values())


def _cause(error: BaseException) -> str:
    """Describe an error, or the first one of a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _part(block: Any) -> dict[str, Any]:
    if block.type == "text":
        return {"type": "text", "text": block.text}
    if block.type in ("image", "audio"):
        return {"type": block.type, block.type: base64.b64decode(block.data)}
    return {"type": "text", "text": f"[{block.type}]"}
