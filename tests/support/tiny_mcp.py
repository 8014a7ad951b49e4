"""Environment of tests that calls a tool of an MCP server with whatever the model says."""

from __future__ import annotations

import json

from relax_actors.envs.adapters.mcp import McpEnvironment
from relax_actors.envs.environment import Result, Step


class Till(McpEnvironment):
    """Asks for the price of as many bolts as the model says; other answers name an article that does not exist."""

    async def step(self, action: str) -> Result:
        """Make the call that a model with random weights would never write."""
        is_number = action.isdecimal()
        arguments = {"article": "bolt" if is_number else "nut", "count": int(action) if is_number else 1}
        call = json.dumps({"name": "price", "arguments": arguments})
        found = await super().step(f"<tool_call>\n{call}\n</tool_call>")
        assert isinstance(found, Step)
        return Step(found.observation, reward=float(is_number), metrics=found.metrics)
