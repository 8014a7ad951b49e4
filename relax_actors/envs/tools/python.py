"""Environment `python`: the model may run Python code, in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from relax_actors.envs.tools.environment import ToolEnvironment
from relax_actors.envs.tools.functions import Tool
from relax_actors.envs.tools.sandbox import Kind, Limits, check_kind, python_command, run_program


def run_python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: the program; it has the standard library, no network and no files.
    """
    raise NotImplementedError(code)


class PythonEnvironment(ToolEnvironment):
    """Tool `run_python`: each call is a new process in a sandbox of bubblewrap, without network and files.

    Attributes:
        sandbox: "bubblewrap", or "none" to run the code with limits alone, as this user.
        seconds: wall clock of a call.
        memory_mib: memory of each process of a call.
        processes: processes and threads of a call.
        max_output: bytes of output.
    """

    tools: ClassVar[Sequence[Callable[..., Any] | Tool]] = (run_python,)
    sandbox: Kind = "bubblewrap"
    seconds: float = 10.0
    memory_mib: int = 512
    processes: int = 16
    max_output: int = 16 << 10

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check that this machine can create the sandbox.

        Raises:
            ConfigError: it cannot, and `sandbox` is not "none".
        """
        super().check_options(options)
        check_kind(options["sandbox"])

    def make_tools(self) -> Sequence[Callable[..., Any] | Tool]:
        """Return the tool with this environment's limits."""
        limits = Limits(self.seconds, None, self.memory_mib, self.processes, output=self.max_output)

        def run(code: str) -> str:
            ended = run_program(python_command(), code, limits, self.sandbox)
            return f"{ended.output}\n[{ended.problem}]".strip() if ended.problem else ended.output

        run.__doc__ = run_python.__doc__
        return (Tool(run, run_python.__name__),)
