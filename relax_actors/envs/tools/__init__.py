"""Tools that a model calls: Python functions with type hints, and an environment that runs the calls."""

from relax_actors.envs.tools.environment import ToolEnvironment
from relax_actors.envs.tools.functions import Tool, ToolError

__all__ = ["Tool", "ToolEnvironment", "ToolError"]
