"""`relax eval`: evaluate a model on the held-out sets of a configuration, without training."""

from __future__ import annotations

from typing import Annotated

import typer

from relax_actors.cli.options import ConfigPath, Gpus, JsonResult, Overrides, SimulateGpus

MODEL = (
    "Model folder, or name or folder of a finished run; `initial`: the model that CONFIG, or its first stage, starts "
)
MODEL += "from; `stages`: it, and the model of each stage of CONFIG."


def eval(  # noqa: A001 the name of the command
    model: Annotated[str, typer.Argument(help=MODEL, metavar="MODEL")],
    config: ConfigPath,
    settings: Overrides = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="Evaluate this set only; may be repeated.", metavar="NAME")
    ] = None,
    json: JsonResult = False,
    samples: Annotated[int, typer.Option(help="Prompts of each set that are shown with their answers.", min=0)] = 2,
    gpus: Gpus = "",
    simulate_gpus: SimulateGpus = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Evaluate again what is evaluated already.")] = False,
) -> None:
    """Evaluate a model on the held-out sets of a configuration, without training.

    The same command resumes an evaluation that was stopped or killed. Exit code 0 when the evaluation is finished or
    was stopped by a signal, 1 when supervision gave up, 2 for a configuration error.
    """
    from relax_actors.cli.evaluations import EvalRequest, run
    from relax_actors.devices.inventory import GpuRequest

    request = EvalRequest(
        model,
        config,
        tuple(settings or []),
        sets=tuple(sets or []),
        samples=samples,
        gpus=GpuRequest(gpus, simulate_gpus),
        as_json=json,
        quiet=quiet,
        fresh=fresh,
    )
    raise typer.Exit(run(request))
