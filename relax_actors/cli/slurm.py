"""`relax slurm`: a batch script that runs a configuration in a Slurm job."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import ConfigPath, MoreRoles, Nodes, Overrides
from relax_actors.runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from relax_actors.cli.planned_nodes import PlannedNodes

BODY = Path(__file__).with_name("slurm_job.sh")
WARNING_SECONDS, STOP_SECONDS = 180, 150
"""Seconds before the time limit at which the run is stopped; seconds after that at which the job is requeued."""


def slurm(
    config: ConfigPath,
    settings: Overrides = None,
    nodes: Nodes = "1x0",
    role: MoreRoles = None,
    port: Annotated[int, typer.Option(help="Port of the broker on the first node.", min=1, max=65535)] = 4222,
) -> None:
    """Print a script for `sbatch`: `relax up` on the first node, `relax node` on others.

    The configuration is checked first; notes and the placement go to stderr. All nodes must share this folder. Options
    of sbatch, such as --partition and --time, are added when the script is submitted. Exit code 2 if the configuration
    does not fit on the nodes.
    """
    from relax_actors.cli.planned_nodes import plan

    planned = plan(config, settings or [], nodes, role or [])
    typer.echo("\n".join(script(config, settings or [], planned, port)))


def script(path: Path, overrides: Sequence[str], planned: PlannedNodes, port: int) -> Iterator[str]:
    """Yield the lines of the script."""
    config, shares = planned.config, planned.shares
    name, runs = config.run.name, config.folder.parent
    folders = {"keys": runs / f"{name}.keys", "store": runs / f"{name}.nats", "run_store": config.store_path}
    checkpoints = RunFolder(config.folder).checkpoints
    values = {"bin": Path(sys.executable).parent, "config": path, **folders, "checkpoints": checkpoints}
    directives = {
        "job-name": f"relax-{name}",
        "nodes": len(shares),
        "ntasks-per-node": 1,
        **({"gpus-per-node": planned.gpus} if planned.gpus else {}),
        "mem": 0,
        "signal": f"B:USR1@{WARNING_SECONDS}",
        "dependency": "singleton",
        "open-mode": "append",
        "output": f"relax-{name}-%j.log",
    }
    yield "#!/bin/bash"
    yield f"# Run {name} on {len(shares)} nodes; `sbatch` of this file also resumes it. The first node has the broker."
    yield from (f"#SBATCH --{key}={value}" for key, value in directives.items())
    yield "#SBATCH --exclusive"
    yield "#SBATCH --requeue"
    yield f"cd {shlex.quote(str(Path.cwd()))}"
    yield from (f"{key}={shlex.quote(str(value))}" for key, value in values.items())
    yield f"port={port} stop_seconds={STOP_SECONDS}"
    yield f"settings=({shlex.join(overrides)})"
    yield f"up=({shlex.join(shares[0].arguments)})"
    others = [
        f"[{share.node}]={shlex.quote(' '.join(f'{role}={n}' for role, n in share.actors.items()))}"
        for share in shares[1:]
    ]
    yield f"roles=({' '.join(others)})"
    yield BODY.read_text().rstrip()
