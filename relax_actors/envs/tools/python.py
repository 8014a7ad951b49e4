"""Environment `python`: the model may run Python code, in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from relax_actors.envs.tools.container import check_container, remove_leftovers, run_in_container
from relax_actors.envs.tools.environment import ToolEnvironment
from relax_actors.envs.tools.functions import Tool
from relax_actors.isolation import control_group
from relax_actors.isolation.sandbox import Ended, Kind, Limits, check_bubblewrap, python_command, run_program

_CONTAINER_PYTHON = ("python3", "-I", "-")


def run_python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: the program; it has the standard library, no network and no files.
    """
    raise NotImplementedError(code)


def run_code(code: str, limits: Limits, sandbox: Kind, image: str) -> Ended:
    """Run a Python program, maybe in a sandbox; raises EnvironmentFaultError."""
    if sandbox == "container":
        return run_in_container(_CONTAINER_PYTHON, code, limits, image)
    return run_program(python_command(), code, limits, sandbox)


class PythonEnvironment(ToolEnvironment):
    """Tool `run_python`: each call is a new process in a sandbox, without network and files.

    Attributes:
        sandbox: "bubblewrap"; "container" for a container of Docker or Podman; or "none" to run the code with limits
            alone, as this user.
        image: image of the containers. It must contain python3, and is never pulled.
        seconds: wall clock of a call, without the start of a container.
        memory_mib: memory of each process of a call; in a container, or where a control group can be created, of all
            and its /tmp together.
        processes: processes and threads of a call.
        max_output: bytes of output.
    """

    tools: ClassVar[Sequence[Callable[..., Any] | Tool]] = (run_python,)
    sandbox: Kind = "bubblewrap"
    image: str = "python:3.12-slim"
    seconds: float = 10.0
    memory_mib: int = 512
    processes: int = 16
    max_output: int = 16 << 10

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check that this machine can create the sandbox, if it is not "none"; raises ConfigError."""
        super().check_options(options)
        if options["sandbox"] == "container":
            check_container(options["image"])
        elif options["sandbox"] == "bubblewrap":
            check_bubblewrap()

    @classmethod
    def clean_up(cls, options: Mapping[str, Any]) -> None:
        """Remove containers and control groups that killed sessions have left behind."""
        if options["sandbox"] == "container":
            remove_leftovers()
        else:
            control_group.remove_leftovers()

    def make_tools(self) -> Sequence[Callable[..., Any] | Tool]:
        """Return the tool with this environment's limits."""
        limits = Limits(self.seconds, None, self.memory_mib, self.processes, output=self.max_output)

        def run(code: str) -> str:
            ended = run_code(code, limits, self.sandbox, self.image)
            return f"{ended.output}\n[{ended.problem}]".strip() if ended.problem else ended.output

        run.__doc__ = run_python.__doc__
        return (Tool(run, run_python.__name__),)
