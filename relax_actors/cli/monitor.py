"""`relax monitor`: watch a live run through its broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import CertificateAuthority, Credentials

if TYPE_CHECKING:
    from broker.address import Address
    from relax_actors.monitoring.sinks import Sink


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
    otlp: Annotated[
        str | None,
        typer.Option(help="Export steps as traces to this OpenTelemetry collector: http://host:4318.", metavar="URL"),
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
    sinks = open_sinks(sink or [], name)
    with tracing(otlp, name, address, sinks):
        watch(name, address, sinks, count=count)


@contextmanager
def tracing(url: str | None, run: str, address: Address, sinks: list[Sink]) -> Iterator[None]:
    """Add a sink that exports traces to a URL, if any; raises ConfigError."""
    if url is None:
        yield
        return
    from contextlib import closing

    from broker.connection import Connection
    from relax_actors.monitoring.log_message import LogMessage
    from relax_actors.monitoring.row_reader import RowReader
    from relax_actors.monitoring.sinks.otlp import EXPORT_SECONDS, OtlpSink
    from relax_actors.monitoring.timeline import Timeline
    from relax_actors.monitoring.timeline.reader import read_step

    rows = RowReader(run, run)
    with closing(Connection(address, "otlp", EXPORT_SECONDS)) as connection:

        def read(step: int, message: LogMessage) -> Timeline:
            return connection.call(read_step(connection, rows, step, message), EXPORT_SECONDS)

        sinks.append(OtlpSink(url, run, read))
        yield
