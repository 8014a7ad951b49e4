"""`relax tail`: print the messages of a subject."""

from __future__ import annotations

from typing import Annotated

import typer

from relax_actors.cli.options import Broker, Credentials


def tail(
    subject: Annotated[str, typer.Argument(help="NATS subject, may have wildcards, e.g. 'relax.demo.event.>'.")],
    run: Annotated[str | None, typer.Option(help="Name or folder of the run. Default: taken from SUBJECT.")] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Start with the stored messages; works without a live run.")
    ] = False,
    count: Annotated[int, typer.Option(help="Exit after this many messages; 0 for no limit.")] = 0,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Print the messages of a subject as they arrive: events, metrics and cells."""
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.tail import print_messages

    print_messages(subject, run, Access(broker, credentials), history=history, count=count)
