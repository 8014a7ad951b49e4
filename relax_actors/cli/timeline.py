"""`relax timeline`: what each actor did when, as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_actors.cli.options import Broker, Credentials, RunName


def timeline(
    run: RunName,
    out: Annotated[Path, typer.Argument(help="File to write, e.g. trace.json.", metavar="OUT")],
    step: Annotated[int | None, typer.Option(help="Only this step: its rows and the trainer.")] = None,
    row: Annotated[str | None, typer.Option(help="Only this row, e.g. group.12.3.")] = None,
    session: Annotated[
        str | None, typer.Option(help="Only the turns of this sample of a row, e.g. group.12.3.0.")
    ] = None,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Write what each actor did when as Chrome trace JSON for ui.perfetto.dev.

    Times are the broker's. Works as an observer, on live and finished runs.
    """
    import json
    import sys
    from contextlib import suppress

    from relax_actors.errors import ConfigError
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import find, observed
    from relax_actors.monitoring.row_reader import RowReader
    from relax_actors.monitoring.timeline import chrome_trace
    from relax_actors.monitoring.timeline.profiles import profiles_of
    from relax_actors.monitoring.timeline.reader import read_row, read_step, read_timeline
    from relax_actors.runtime.row import parse_row

    if sum(given is not None for given in (step, row, session)) > 1:
        msg = "give one of --step, --row and --session"
        raise ConfigError(msg)
    sample = None
    if session is not None:
        row, _, number = session.rpartition(".")
        if not (number.isascii() and number.isdigit()):
            msg = f"--session {session} names no sample; give row and number of the sample, such as group.12.3.0"
            raise ConfigError(msg)
        sample = int(number)
    wanted = None if row is None else parse_row(row)
    profiles: list[Path] = []
    with observed(run, Access(broker, credentials)) as at:
        rows = RowReader(at.run, run)
        if wanted is not None:
            work = read_row(at.connection, rows, wanted, sample)
        elif step is not None:
            work = read_step(at.connection, rows, step)
        else:
            work = read_timeline(at.connection, rows)
        shown = at.connection.call(work, 600)
    # The folder of a run elsewhere is not on this machine.
    with suppress(ConfigError):
        profiles = profiles_of(find(run))
    try:
        out.write_text(json.dumps(chrome_trace(shown, [path.name for path in profiles])))
    except OSError as error:
        msg = f"{out} cannot be written: {error}; give another file"
        raise ConfigError(msg) from error
    sys.stdout.write(f"{len(shown.spans)} spans and {len(shown.instants)} events in {out}\n")
    for path in profiles:
        sys.stdout.write(f"profile {path}\n")
