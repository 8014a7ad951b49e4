"""`relax console`: see a run in a browser."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_actors.cli.options import Broker, Credentials

if TYPE_CHECKING:
    from relax_actors.console.run import ConsoleRun


def console(
    run: Annotated[
        str | None, typer.Argument(help="Name or folder of the run; the newest in runs/ if none.", metavar="RUN")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 for a free one.", min=0, max=65535)] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Further host name under which browsers reach it; may be repeated.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show a recorded run of the demo; needs no run.")] = False,
    operator: Annotated[bool, typer.Option("--operator", help="Print a link that permits operations.")] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
    listen_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Show a run in a browser: curves, actors, weights, evaluations, advice.

    Reads the broker and the store as an observer. The printed link holds a random token.
    """
    from relax_actors.console.activation import NICENESS
    from relax_actors.console.app import Console
    from relax_actors.console.guard import Tokens
    from relax_actors.console.link import HOST, is_console, load_link, open_link
    from relax_actors.console.runs import ConsoleRuns
    from relax_actors.console.server import serve
    from relax_actors.monitoring.access import Access

    with ExitStack() as stack:
        name = stack.enter_context(_recorded(run)) if demo else run or _newest()
        runs = ConsoleRuns(name, Access(broker, credentials))
        folder = runs.folder.root
        if listen_fd is not None:
            os.nice(NICENESS)
            link, listener = _inherited(listen_fd)
        else:
            known = load_link(folder) if port is None and host == HOST else None
            if known is not None and is_console(known):
                _show(folder, known.url(operator=operator), runs.first, no_open=no_open)
                return
            link, listener = open_link(folder, host, port)
            _show(folder, link.url(operator=operator), runs.first, no_open=no_open)
        operations = {"requeue": _requeue, "scale": _scale}
        serve(Console(runs, operations), runs, Tokens(link.observer, link.operator), listener, tuple(allow_host or ()))


@contextmanager
def _recorded(run: str | None) -> Iterator[str]:
    """Unpack the recorded run into a temporary folder; raises ConfigError if a run is named."""
    from tempfile import TemporaryDirectory

    from relax_actors.console.recording import unpack
    from relax_actors.errors import ConfigError

    if run is not None:
        msg = f"--demo shows a recorded run, not {run!r}; leave out one of the two"
        raise ConfigError(msg)
    with TemporaryDirectory(prefix="relax-console-") as folder:
        yield str(unpack(Path(folder)))


def _newest() -> str:
    from relax_actors.console.run import runs_beside
    from relax_actors.errors import ConfigError

    runs = runs_beside("runs")
    if not runs:
        msg = "runs/ holds no run; start one with `relax up CONFIG`, or name the folder of a run"
        raise ConfigError(msg)
    return runs[0]


def _inherited(descriptor: int) -> tuple[Any, Any]:
    """Return the link of `relax up` and the socket that it listens on."""
    import socket

    from relax_actors.console.link import LINK_VARIABLE, parse_link
    from relax_actors.errors import ConfigError

    link = parse_link(os.environ.pop(LINK_VARIABLE, ""))
    if link is None:
        msg = f"--listen-fd needs the link of `relax up` in {LINK_VARIABLE}; run `relax console RUN` without it"
        raise ConfigError(msg)
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    return link, listener


def _show(folder: Path, url: str, run: str, *, no_open: bool) -> None:
    import sys

    from relax_actors.console.link import write_redirect

    typer.echo(f"console of run {run}: {url}")
    sys.stdout.flush()
    if not no_open and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(write_redirect(folder, url))


def _requeue(run: ConsoleRun, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Requeue quarantined rows: `{"rows": ["group.12.3"]}`."""
    from relax_actors.errors import ConfigError
    from relax_actors.monitoring.connection import connected
    from relax_actors.monitoring.quarantine import requeue

    rows = body.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, str) for row in rows):
        msg = 'requeue needs the rows as a list, e.g. {"rows": ["group.12.3"]}'
        raise ConfigError(msg)
    with connected(str(run.folder.root), run.access) as at:
        return {"requeued": requeue(at, rows, everything=False)}


def _scale(run: ConsoleRun, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Set the number of actors of a role: `{"role": "rollout", "actors": 2}`."""
    from relax_actors.cli.scaling import ScaleOptions, begin_scaling
    from relax_actors.errors import ConfigError
    from relax_actors.monitoring.connection import connected

    role, actors = body.get("role"), body.get("actors")
    if not isinstance(role, str) or type(actors) is not int:
        msg = 'scale needs a role and its number of actors, e.g. {"role": "rollout", "actors": 2}'
        raise ConfigError(msg)
    with connected(str(run.folder.root), run.access) as at:
        begun = begin_scaling(at, [f"{role}={actors}"], ScaleOptions())
    return {"operations": [operation.id for operation in begun]}
