"""A request for an answer of the console: the run that it is about, and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_actors.console.errors import RequestError
from relax_actors.console.run import ConsoleRun

Operation = Callable[[ConsoleRun, Mapping[str, Any]], Mapping[str, Any]]
"""Changes a run; called in a thread with the run and the fields of the request."""


@dataclass(frozen=True, slots=True)
class Query:
    """A request.

    Attributes:
        run: the run that it is about.
        parameters: parameters of the URL.
        open_runs: opens another run beside it by its name.
        names: names of all runs beside it, the newest first.
    """

    run: ConsoleRun
    parameters: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter."""
        return self.parameters.get(name, default)

    def number(self, name: str, default: int | None = None, *, least: int = 0, most: int = 1 << 53) -> int | None:
        """Return a parameter as a number; raises RequestError unless it is a whole one from `least` to `most`."""
        given = self.parameters.get(name)
        if given is None:
            return default
        if not (given.isascii() and given.isdigit() and len(given) < 20 and least <= int(given) <= most):  # noqa: PLR2004
            msg = f"parameter {name} = {given[:40]!r} is not a whole number from {least} to {most}"
            raise RequestError(400, msg, "invalid_parameter")
        return int(given)

    def needed(self, name: str) -> int:
        """Return a parameter as a number; raises RequestError if it is missing or no number."""
        if (number := self.number(name)) is None:
            msg = f"parameter {name} is missing; give a whole number"
            raise RequestError(400, msg, "missing_parameter")
        return number
