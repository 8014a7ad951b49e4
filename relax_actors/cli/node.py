"""`relax node`: add a node to a run that was started elsewhere."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import CertificateAuthority, Credentials, Gpus, Overrides, SimulateGpus
from relax_actors.printable import printable_lines

if TYPE_CHECKING:
    from broker.address import Address
    from relax_actors.supervision.remote_node import NodeRequest


def node(
    broker: Annotated[str, typer.Option(help="Broker of the run: nats://host:port.")],
    role: Annotated[list[str], typer.Option(help="Actors of this node: role=number, e.g. rollout=2; may be repeated.")],
    store: Annotated[Path, typer.Option(help="Store of the run as seen here; {run} stands for the run's name.")],
    settings: Overrides = None,
    run: Annotated[str | None, typer.Option(help="Name of the run. Default: taken from the credentials.")] = None,
    credentials: Credentials = None,
    ca: CertificateAuthority = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the run as seen here. Default: the folder above STORE.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder for this node's logs, shared with no other node. Default: in ~/.cache.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this node, unique in the run. Default: the host name.")
    ] = None,
    code: Annotated[Path | None, typer.Option(help="Folder with the run's own Python modules.")] = None,
    gpus: Gpus = "",
    simulate_gpus: SimulateGpus = "",
    spot: Annotated[
        bool, typer.Option("--spot", help="This machine may vanish: its rollouts get rows only above a backlog.")
    ] = False,
    grace: Annotated[
        float | None,
        typer.Option(min=1.0, help="Seconds from SIGTERM to the end; rows that take longer are returned."),
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Wait for the run to resume after it ends.")] = False,
    must_finish: Annotated[
        bool, typer.Option("--must-finish", help="Exit with code 1 if asked to leave before the run is over.")
    ] = False,
) -> None:
    """Join a run from another machine with some actors; SIGTERM drains them and leaves.

    Exit code 0 when the run is over or the node was asked to leave, 1 when an actor cannot be kept up, 2 for a
    configuration error.
    """
    from broker.address import address_of
    from broker.permissions import NODE
    from relax_actors.devices.inventory import GpuRequest
    from relax_actors.monitoring.connection import run_of_credentials
    from relax_actors.supervision.assignment import split_wanted
    from relax_actors.supervision.remote_node import NodeRequest

    for wanted_role in role:
        split_wanted(wanted_role)
    if name is not None:
        _checked(name)
    address = address_of(broker, credentials, ca)
    run_name = run_of_credentials(address.for_user(NODE), run)
    path = Path(str(store).replace("{run}", run_name))
    root = path.resolve().parent if folder is None else Path(str(folder).replace("{run}", run_name))
    name = _host_name() if name is None else _checked(name)
    work = work or _work_folder(run_name, name)
    chosen = GpuRequest(gpus, simulate_gpus)
    wanted = NodeRequest(run_name, name, role, path, root, work, code, tuple(settings or []), stay, chosen, spot, grace)
    raise typer.Exit(_run_node(address, wanted, must_finish=must_finish))


def _checked(name: str) -> str:
    """Return a node's valid name; raises ConfigError."""
    from broker.subjects import check_name
    from relax_actors.errors import ConfigError, SubjectError

    try:
        return check_name(name, "node name")
    except SubjectError as error:
        msg = f"--name: {error}"
        raise ConfigError(msg) from error


def _host_name() -> str:
    """Return the host name as a node's name, with `-` for other characters."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", os.uname().nodename)[:64] or "node"


def _work_folder(run: str, name: str) -> Path:
    """Return the default folder of a node, in the user's cache directory.

    Not in $XDG_RUNTIME_DIR, which is removed when the user logs out, while the node goes on.

    Raises:
        ConfigError: the user has no home directory, or another user could put another folder in its place.
    """
    from broker.files import check_parents
    from relax_actors.errors import ConfigError, UnsafePathError

    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        top = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
        folder = top.absolute() / "relax" / "nodes" / f"{run}.{name}"
        check_parents(folder)
    except (RuntimeError, UnsafePathError) as error:
        msg = f"no safe folder for this node's logs: {error}; set --work FOLDER"
        raise ConfigError(msg) from error
    return folder


def _run_node(address: Address, wanted: NodeRequest, *, must_finish: bool) -> int:
    """Run a node until it leaves; a first signal drains its actors, a second ends them."""
    from relax_actors.isolation.orphans import become_subreaper
    from relax_actors.runtime import logs
    from relax_actors.supervision.remote_node import RemoteNode

    logs.configure()
    become_subreaper()
    remote = RemoteNode(address, wanted)
    leaving = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        if leaving.is_set():
            # Children die with this process.
            os._exit(128 + number)
        leaving.set()
        remote.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    report = remote.run()
    if report is None:
        return 1 if must_finish and leaving.is_set() else 0
    text = f"relax node: {report.child}: {report.reason}; its logs are in {wanted.work_folder}/logs"
    sys.stderr.write(printable_lines(text) + "\n")
    return 1
