"""`relax simulate`: predict a run on a simulated cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_actors.cli.options import ConfigPath, JsonResult, Overrides
from relax_actors.errors import ConfigError


def simulate(
    config: ConfigPath,
    settings: Overrides = None,
    split: Annotated[
        bool, typer.Option("--split", help="Also search the split of devices with the shortest step.")
    ] = False,
    times: Annotated[
        Path | None,
        typer.Option(help="Take [simulate] from this file, and GPUs, rows and staleness from CONFIG, a run on GPUs."),
    ] = None,
    autoscaler: Annotated[
        bool, typer.Option("--autoscaler", help="Only try the autoscaler of CONFIG on five modelled loads.")
    ] = False,
    json: JsonResult = False,
) -> None:
    """Predict a run on a simulated cluster.

    Runs the real actors and table with engines that only take time. CONFIG has a section "simulate", or
    --times names a file that has one: docs/simulate.md.
    """
    if autoscaler:
        if times is not None:
            msg = "--autoscaler does not use the times of --times; leave out one of them"
            raise ConfigError(msg)
        from relax_actors.cli.modelled_loads import show_loads

        raise typer.Exit(show_loads(config, settings or [], as_json=json))
    from relax_actors.cli.prediction import predict_all

    raise typer.Exit(predict_all(config, settings or [], times, split=split, as_json=json))
