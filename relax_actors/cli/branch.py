"""`relax branch`: a new run that goes on from a step of another one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from relax_actors.cli.options import Broker, Credentials, JsonResult, Overrides, RunName


def branch(
    run: RunName,
    new: Annotated[
        str, typer.Argument(help="Name of the new run; its folder is made beside that of RUN.", metavar="NEW")
    ],
    settings: Overrides = None,
    at: Annotated[int | None, typer.Option(help="Step that the new run begins with.", min=0)] = None,
    no_start: Annotated[bool, typer.Option("--no-start", help="Make the folder, and train nothing.")] = False,
    json: JsonResult = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Begin a new run at a step of another run, with the step's rows and other settings.

    The rows of the step are not generated again. With equal settings, an on-policy deterministic run ends with the same
    weights. `relax up FOLDER` resumes the new run. Exit codes as of `relax up`.
    """
    from broker.subjects import check_name
    from relax_actors.cli.command_lines import command_line, relative
    from relax_actors.cli.foreground import Request, train
    from relax_actors.errors import ConfigError
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.screen import Screen
    from relax_actors.replay.branch import Branch
    from relax_actors.replay.recording import opened

    if at is None:
        msg = "say where the new run begins: --at STEP"
        raise ConfigError(msg)
    name, screen = check_name(new, "run name"), Screen(stderr=json)
    with opened(run, Access(broker, credentials)) as recording:
        made = Branch(recording, recording.at.folder.root.parent / name, name, at, settings or [])
        folder = made.make(lambda text: screen.show(text) if not quiet and sys.stderr.isatty() else None)
    path = Path(relative(folder.root))
    screen.show(f"run {name} begins at step {at} of run {run}; `{command_line('up', str(path))}` resumes it")
    if not no_start:
        raise typer.Exit(train(Request(path, as_json=json, quiet=quiet)))
