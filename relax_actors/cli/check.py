"""`relax check`: find what would fail later, without starting anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_actors.cli.options import ConfigPath, Gpus, Overrides, SimulateGpus
from relax_actors.printable import printable_lines

if TYPE_CHECKING:
    from relax_actors.checks import Findings
    from relax_actors.config import Config
    from relax_actors.devices.inventory import Inventory


def check(
    config: ConfigPath,
    settings: Overrides = None,
    roles: Annotated[
        str | None, typer.Option(help="Check this machine for these roles only, as `relax up --roles` starts them.")
    ] = None,
    gpus: Gpus = "",
    simulate_gpus: SimulateGpus = "",
    nodes: Annotated[
        str, typer.Option(help="Place the run on nodes with GPUs, such as 2x8 or 2x8x80GiB, in place of this machine.")
    ] = "",
    shape: Annotated[
        Path | None,
        typer.Option(help="Folder with the config.json of the model, where the model and the data are not."),
    ] = None,
    calls: Annotated[
        bool, typer.Option(help="Call rewards and the environment once, with the first row of the data.")
    ] = True,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Also print the resolved configuration as JSON, without passwords.")
    ] = False,
) -> None:
    """Check a configuration without starting anything.

    Findings go to stderr, the resolved configuration to stdout. Exit code 0 if the configuration can be run, 2 if not.
    """
    from relax_actors.checks import examine
    from relax_actors.config import load_config
    from relax_actors.config.load import set_by, stages_of
    from relax_actors.data.epochs import with_epochs
    from relax_actors.devices.cluster import simulated_nodes
    from relax_actors.devices.inventory import GpuRequest

    cluster = simulated_nodes(nodes) if nodes else []
    inventory = GpuRequest(gpus, simulate_gpus).inventory() if not cluster else cluster[0]
    chosen = None if roles is None else [role for role in roles.split(",") if role]
    folder = config.resolve().parent if calls else None
    given, first = settings or [], None
    passed = True
    stages: list[str | None] = [*stages_of(config, given)]
    for stage in stages or [None]:
        own = given if stage is None else [*given, f"run.stage={stage}"]
        loaded = with_epochs(load_config(config, own))
        if stage is not None:
            typer.echo(f"stage {stage}", err=True)
            first = first or loaded
            if first is not loaded and loaded.model.path is not None and not loaded.model.path.exists():
                # What the stage before will have trained has the shape of the model that the first one begins with.
                loaded = loaded.model_copy(update={"model": first.model})
        spelled = set_by(config, own)
        findings = examine(loaded, chosen, spelled, calls=folder, inventory=inventory, nodes=cluster, shape=shape)
        _print_findings(loaded, spelled, findings, cluster, on_paper=shape is not None)
        passed = passed and not findings.errors
        if resolved:
            typer.echo(json.dumps(resolved_settings(loaded), indent=1))
    raise typer.Exit(0 if passed else 2)


def _print_findings(
    loaded: Config, spelled: dict[str, str], findings: Findings, cluster: list[Inventory], *, on_paper: bool
) -> None:
    from relax_actors.checks.cluster import place_on_nodes, placement_lines
    from relax_actors.cli.algorithms import algorithm_lines

    for error in findings.errors:
        typer.echo(printable_lines(f"error: {error}"), err=True)
    for note in findings.notes:
        typer.echo(_coloured(printable_lines(f"note: {note}")), err=True)
    if cluster and findings.facts is not None:
        placed = place_on_nodes(loaded, cluster, findings.facts)
        for line in placement_lines(loaded, cluster, placed):
            typer.echo(printable_lines(line), err=True)
    for line in algorithm_lines(loaded, spelled):
        typer.echo(printable_lines(line), err=True)
    if findings.errors:
        count = len(findings.errors)
        them = "1 error; fix it" if count == 1 else f"{count} errors; fix them"
        typer.echo(f"failed: {them} before `relax up`", err=True)
    else:
        unknown = ", if model and data are as it says" if on_paper else ""
        typer.echo(f"ok: this configuration can be run{unknown}", err=True)


def _coloured(line: str) -> str:
    """Return a line with trained text in green, for a terminal."""
    from relax_actors.data.example_check import CLOSE, OPEN

    if not sys.stderr.isatty():
        return line
    return line.replace(OPEN, f"{OPEN}\x1b[32m").replace(CLOSE, f"\x1b[0m{CLOSE}")


def resolved_settings(config: Config) -> dict[str, Any]:
    """Return all settings of a run as plain data, defaults included, with secrets as ***."""
    from relax_actors.config.masking import masked

    settings: dict[str, Any] = masked(config.model_dump(mode="json", exclude_none=True))
    return settings
