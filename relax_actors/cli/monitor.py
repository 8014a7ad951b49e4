"""`relax monitor`: watch a live run through its broker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_actors.cli.options import CertificateAuthority, Credentials


def monitor(
    run: Annotated[str | None, typer.Argument(help="Name or folder of the run.", metavar="RUN")] = None,
    broker: Annotated[str | None, typer.Option(help="Broker of a run elsewhere: nats://host:port.")] = None,
    credentials: Credentials = None,
    ca: CertificateAuthority = None,
    sink: Annotated[
        list[str] | None,
        typer.Option(
            help="Also write to a sink: prometheus=PORT, tensorboard=DIR, wandb=PROJECT, or the dotted path of "
            "your own class; may be repeated.",
            metavar="NAME=TARGET",
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="Exit after this many messages; 0 to exit with the run.")] = 0,
) -> None:
    """Watch a live run on the terminal, and export its metrics and events to sinks.

    Shows reward, loss, KL, staleness, rows, actors and events. Uses the broker only, with credentials of an observer.
    """
    from relax_actors.config import make_importable
    from relax_actors.monitoring.connection import locate
    from relax_actors.monitoring.sinks import open_sinks
    from relax_actors.monitoring.terminal import watch

    name, address = locate(run, broker, credentials, ca)
    make_importable(Path.cwd())
    watch(name, address, open_sinks(sink or [], name), count=count)
