"""`relax up`: start or resume a run."""

from __future__ import annotations

from typing import Annotated

import typer

from relax_actors.cli.options import ConfigPath, Gpus, JsonResult, Overrides, SimulateGpus


def up(
    config: ConfigPath,
    settings: Overrides = None,
    json: JsonResult = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
    roles: Annotated[
        str | None, typer.Option(help="Start these roles only, e.g. prompts,trainer; see `relax node`.")
    ] = None,
    gpus: Gpus = "",
    simulate_gpus: SimulateGpus = "",
    must_finish: Annotated[
        bool, typer.Option("--must-finish", help="Exit with code 1 if stopped before the last step.")
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Remove the run that the folder holds, or those of all stages, and start from nothing."
        ),
    ] = False,
    no_console: Annotated[
        bool, typer.Option("--no-console", help="Print no link to the web console, and start none.")
    ] = False,
) -> None:
    """Train: start a run, or resume it from its last checkpoint.

    Exit code 0 when the run is finished or was stopped by a signal, 1 when supervision gave up, 2 for a configuration
    error.
    """
    from relax_actors.cli.foreground import Request, train
    from relax_actors.devices.inventory import GpuRequest

    chosen = None if roles is None else tuple(role for role in roles.split(",") if role)
    request = Request(
        config,
        tuple(settings or []),
        roles=chosen,
        gpus=GpuRequest(gpus, simulate_gpus),
        as_json=json,
        quiet=quiet,
        must_finish=must_finish,
        fresh=fresh,
        console=not no_console and not quiet,
    )
    raise typer.Exit(train(request))
