"""Commands whose texts, paths and flags are taken as they are given.

typer validates every parameter by pydantic, `--help` and parameters that are not given included. Where a command has
nothing else to validate, the import of pydantic takes a fifth of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

PLAIN: dict[Any, Callable[[Any], Any]] = {bool: bool, str: str, Path: Path, list[str]: list}
"""Types of parameters whose values cannot be wrong, and how to make them of what the command line has."""


@dataclass(frozen=True, slots=True)
class _Plain:
    """Stands for the validation of a parameter."""

    make: Callable[[Any], Any]

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        del ctx
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        return self.make(value)


def _taken_as_given(parameters: list[Any]) -> list[Any]:
    """Keep typer from validating plain parameters; a typer that is built otherwise goes on to validate them."""
    for parameter in parameters:
        annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
        if annotation in PLAIN:
            parameter._runtime_param = _Plain(PLAIN[annotation])  # noqa: SLF001
    return parameters


class PlainCommand(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, `--help` included."""
        return _taken_as_given(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """A command with subcommands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, `--help` included."""
        return _taken_as_given(super().get_params(ctx))
