"""`relax slurm`: a batch script that runs a configuration in a Slurm job."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import ConfigPath, Overrides
from relax_actors.printable import printable_lines

if TYPE_CHECKING:
    from relax_actors.checks.cluster import NodeShare
    from relax_actors.config import Config

BODY = Path(__file__).with_name("slurm_job.sh")
WARNING_SECONDS = 120
"""Time before the end of a job at which it saves its work and asks for another turn."""


def slurm(
    config: ConfigPath,
    settings: Overrides = None,
    nodes: Annotated[
        str, typer.Option(help="Nodes of the job and GPUs of each, such as 2x8 or 2x8x80GiB; 2x0 for CPUs.")
    ] = "1x0",
    role: Annotated[
        list[str] | None,
        typer.Option(help="Actors of each node but the first: role=number, e.g. rollout=2; for nodes without GPUs."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the broker on the first node.", min=1, max=65535)] = 4222,
) -> None:
    """Print a batch script for `sbatch`: broker and `relax up` on the first node, `relax node` on the others.

    The configuration is checked first; notes and the placement go to stderr. Submit the script in the folder where this
    command ran, which all nodes must share. Options of sbatch, such as --partition and --time, are added there. Exit
    code 2 if the configuration does not fit on the nodes.
    """
    from relax_actors.checks import examine
    from relax_actors.checks.cluster import node_shares, placement_lines
    from relax_actors.config import load_config
    from relax_actors.config.load import set_by
    from relax_actors.devices.cluster import simulated_nodes
    from relax_actors.errors import ConfigError

    cluster, overrides = simulated_nodes(nodes), settings or []
    loaded = load_config(config, overrides)
    findings = examine(loaded, spelled=set_by(config, overrides), inventory=cluster[0], nodes=cluster)
    if findings.errors or findings.facts is None:
        raise ConfigError("\n".join(findings.errors))
    for line in (*findings.notes, *placement_lines(loaded, cluster, findings.facts)):
        typer.echo(printable_lines(line), err=True)
    shares = node_shares(loaded, cluster, findings.facts)
    shares = _with_roles(loaded, shares, len(cluster), role or [])
    typer.echo("\n".join(script(config, loaded, overrides, shares, gpus=len(cluster[0].gpus), port=port)))


def _with_roles(config: Config, shares: Sequence[NodeShare], count: int, wanted: Sequence[str]) -> list[NodeShare]:
    """Add actors to each node but the first.

    Raises:
        ConfigError: a node has no actors, or a role is none of the run's.
    """
    from relax_actors.checks.cluster import NodeShare
    from relax_actors.errors import ConfigError
    from relax_actors.roles import role_names
    from relax_actors.supervision.assignment import split_wanted

    more = dict(split_wanted(text) for text in wanted)
    if unknown := sorted(set(more) - set(role_names(config))):
        msg = f"--role: the run has no role {', '.join(unknown)}; its roles are {', '.join(role_names(config))}"
        raise ConfigError(msg)
    known = {share.node: dict(share.actors) for share in shares}
    for node in range(1, count):
        known[node] = known.get(node, {}) | more
        if not known[node]:
            msg = f"node {node} has no actor; take fewer nodes, or say what runs there, such as --role rollout=1"
            raise ConfigError(msg)
    return [NodeShare.of(config, node, actors) for node, actors in sorted(known.items())]


def script(
    path: Path, config: Config, overrides: Sequence[str], shares: Sequence[NodeShare], *, gpus: int, port: int
) -> Iterator[str]:
    """Yield the lines of the script.

    Args:
        path: file of the configuration, absolute or from the folder in which the job is submitted.
        config: the configuration.
        overrides: settings in place of the file's.
        shares: what each node does.
        gpus: GPUs of each node.
        port: port of the broker.
    """
    name, runs = config.run.name, config.folder.parent
    folders = {"keys": runs / f"{name}.keys", "store": runs / f"{name}.nats", "run_store": config.store_path}
    values = {"bin": Path(sys.executable).parent, "config": path, **folders, "port": port}
    yield "#!/bin/bash"
    yield f"# Run {name} on {len(shares)} nodes; `sbatch` of this file also resumes it. The first node has the broker."
    yield f"#SBATCH --job-name={shlex.quote(f'relax-{name}')}"
    yield f"#SBATCH --nodes={len(shares)}"
    yield "#SBATCH --ntasks-per-node=1"
    yield "#SBATCH --exclusive"
    if gpus:
        yield f"#SBATCH --gpus-per-node={gpus}"
    yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --signal=B:USR1@{WARNING_SECONDS}"
    yield f"#SBATCH --output={shlex.quote(f'relax-{name}-%j.log')}"
    yield from (f"{key}={shlex.quote(str(value))}" for key, value in values.items())
    yield f"settings=({shlex.join(overrides)})"
    yield f"up=({shlex.join(shares[0].arguments)})"
    others = [
        f"[{share.node}]={shlex.quote(' '.join(f'{role}={n}' for role, n in share.actors.items()))}"
        for share in shares[1:]
    ]
    yield f"roles=({' '.join(others)})"
    yield BODY.read_text().rstrip()
