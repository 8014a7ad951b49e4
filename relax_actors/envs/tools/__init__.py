"""Tools of a model: Python functions with type hints, and an environment for calls."""

from relax_actors.envs.tools.environment import ToolEnvironment
from relax_actors.envs.tools.functions import Tool, ToolError

__all__ = ["Tool", "ToolEnvironment", "ToolError"]
