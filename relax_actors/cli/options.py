"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[
    Path,
    typer.Argument(
        help="TOML file of the run, e.g. examples/demo/demo.toml, or the folder of a run.", metavar="CONFIG"
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Override settings: section.key=value ...", metavar="SETTING")
]
RunName = Annotated[str, typer.Argument(help="Name or folder of the run.", metavar="RUN")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
JsonResult = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON at the end.")]
Gpus = Annotated[str, typer.Option("--gpus", help="GPUs of this machine to use: their numbers, such as 0,1, or none.")]
SimulateGpus = Annotated[
    str,
    typer.Option(
        "--simulate-gpus", help="Place actors as on a machine with these GPUs, such as 8x80GiB; compute on CPUs."
    ),
]
Broker = Annotated[
    str | None,
    typer.Option(help="Address of the run's broker from this machine, if not the recorded one: nats://host:port."),
]
Credentials = Annotated[Path | None, typer.Option(help="Folder written by `relax keys`, or a .creds file.")]
CertificateAuthority = Annotated[Path | None, typer.Option(help="Certificate of the broker's certificate authority.")]
Nodes = Annotated[
    str, typer.Option(help="Nodes of the run and GPUs of each, such as 2x8 or 2x8x80GiB; 2x0: two nodes without GPUs.")
]
MoreRoles = Annotated[
    list[str] | None,
    typer.Option(help="Actors of each node but the first: role=number, e.g. rollout=2; for nodes without GPUs."),
]
