"""`relax node`: take part in a run that was started elsewhere."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from broker.credentials import read_claims
from broker.subjects import check_name
from relax_actors.errors import ConfigError
from relax_actors.roles.permissions import NODE
from relax_actors.runtime import logs
from relax_actors.supervision.remote_node import NodeRequest, RemoteNode
from relax_actors.supervision.root import address_of


@dataclass(frozen=True, slots=True)
class Joining:
    """Where the run is, and how this node signs in."""

    url: str
    credentials: Path | None
    ca: Path | None
    run: str | None
    name: str | None
    work: Path | None
    stays: bool


def join(
    place: Joining, roles: list[str], store: Path, folder: Path | None, code: Path | None, settings: list[str]
) -> int:
    """The verb; gives the exit code.

    Raises:
        ConfigError: what is asked for cannot be.
        BrokerError: the broker does not answer, or refuses the credentials.
    """
    logs.configure()
    address = address_of(place.url, place.credentials, place.ca)
    own = address.for_user(NODE).credentials
    run = place.run or (read_claims(Path(own)).name.partition(".")[0] if own else None)
    if run is None:
        msg = "say which run, by --run, or by --credentials of its own"
        raise ConfigError(msg)
    check_name(run, "run name")
    store = Path(str(store).replace("{run}", run))
    folder = store.resolve().parent if folder is None else Path(str(folder).replace("{run}", run))
    name = place.name or os.uname().nodename
    work = place.work or Path(tempfile.gettempdir()) / f"relax-{os.getuid()}" / f"{run}.{name}"
    wanted = NodeRequest(run, name, roles, store, folder, work, code, tuple(settings), place.stays)
    node = RemoteNode(address, wanted)
    asked = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        if asked.is_set():
            # Asked twice: the children die with this process.
            os._exit(128 + number)
        asked.set()
        node.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    report = node.run()
    if report is None:
        return 0
    sys.stderr.write(f"relax node: {report.child}: {report.reason}; its logs are in {work}/logs\n")
    return 1
