"""Command lines that messages suggest."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from pathlib import Path


def command_line(*arguments: str) -> str:
    """Return a command line with these arguments, quoted for a shell where needed.

    It begins with `relax` if the shell finds the program that runs under this name, else with the path of the program.
    """
    return shlex.join([*_program(), *arguments])


def _program() -> list[str]:
    started = Path(sys.argv[0])
    if started.suffix == ".py" or not os.access(started, os.X_OK):
        return [_short(Path(sys.executable)), "-m", "relax_actors.cli.main"]
    on_path = shutil.which(started.name)
    if on_path is not None and Path(on_path).exists() and Path(on_path).samefile(started):
        return [started.name]
    return [_short(started)]


def _short(path: Path) -> str:
    """Return a path relative to the working directory, with a slash for the shell."""
    path = Path(os.path.abspath(path))  # noqa: PTH100 a virtual environment's links must stay
    if not path.is_relative_to(Path.cwd()):
        return str(path)
    short = str(path.relative_to(Path.cwd()))
    return short if os.sep in short else f"./{short}"


def relative(path: Path) -> str:
    """Return a path relative to the working directory where it is below it."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
