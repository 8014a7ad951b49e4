"""`relax check`: find what would fail later, without starting anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_actors.cli.options import ConfigPath, Gpus, Overrides, SimulateGpus
from relax_actors.printable import printable_lines

if TYPE_CHECKING:
    from relax_actors.config import Config


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
    from relax_actors.checks.cluster import place_on_nodes, placement_lines
    from relax_actors.cli.algorithms import algorithm_lines
    from relax_actors.config import load_config
    from relax_actors.config.load import set_by
    from relax_actors.data.epochs import with_epochs
    from relax_actors.devices.cluster import simulated_nodes
    from relax_actors.devices.inventory import GpuRequest

    cluster = simulated_nodes(nodes) if nodes else []
    inventory = GpuRequest(gpus, simulate_gpus).inventory() if not cluster else cluster[0]
    loaded = with_epochs(load_config(config, settings or []))
    spelled = set_by(config, settings or [])
    chosen = None if roles is None else [role for role in roles.split(",") if role]
    folder = config.resolve().parent if calls else None
    findings = examine(loaded, chosen, spelled, calls=folder, inventory=inventory, nodes=cluster)
    for error in findings.errors:
        typer.echo(printable_lines(f"error: {error}"), err=True)
    for note in findings.notes:
        typer.echo(printable_lines(f"note: {note}"), err=True)
    if cluster and findings.facts is not None:
        placed = place_on_nodes(loaded, cluster, findings.facts).actors
        for line in placement_lines(loaded, cluster, placed):
            typer.echo(printable_lines(line), err=True)
    for line in algorithm_lines(loaded, spelled):
        typer.echo(printable_lines(line), err=True)
    if findings.errors:
        count = len(findings.errors)
        them = "1 error; fix it" if count == 1 else f"{count} errors; fix them"
        typer.echo(f"failed: {them} before `relax up`", err=True)
    else:
        typer.echo("ok: this configuration can be run", err=True)
    if resolved:
        typer.echo(json.dumps(resolved_settings(loaded), indent=1))
    raise typer.Exit(2 if findings.errors else 0)


def resolved_settings(config: Config) -> dict[str, Any]:
    """Return all settings of a run as plain data, defaults included, with secrets as ***."""
    from relax_actors.config.masking import masked

    settings: dict[str, Any] = masked(config.model_dump(mode="json", exclude_none=True))
    return settings
