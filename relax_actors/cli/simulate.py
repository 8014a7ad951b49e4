"""`relax simulate`: predict a run on a simulated cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from relax_actors.cli.options import ConfigPath, JsonResult, Overrides


def simulate(
    config: ConfigPath,
    settings: Overrides = None,
    split: Annotated[
        bool, typer.Option("--split", help="Also search the split of devices with the shortest step.")
    ] = False,
    json: JsonResult = False,
) -> None:
    """Predict a run on a simulated cluster.

    Runs the real actors and table with engines that only take time. CONFIG has a section "simulate": docs/simulate.md.
    """
    from relax_actors.cli.prediction import predict_all

    raise typer.Exit(predict_all(config, settings or [], split=split, as_json=json))
