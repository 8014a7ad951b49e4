"""A connection to a run, live or over: the broker of a run that is over is started for as long as it is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.address import Address
from broker.connection import Connection
from broker.leases import RunState
from broker.server import Server, ServerSettings, is_listening
from broker.store import Store
from broker.streams import ensure_bucket
from broker.subjects import Subjects
from broker.table import Table
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.roles.permissions import OPERATOR
from relax_actors.runtime import logs
from relax_actors.runtime.run_folder import RunFolder

REACH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Connected:
    """A run that can be read."""

    folder: RunFolder
    config: Config
    table: Table
    state: RunState
    live: bool


def find(run: str) -> RunFolder:
    """The folder of a run, by its name below `runs/` or by path.

    Raises:
        ConfigError: there is none.
    """
    for path in (Path(run), Path("runs") / run):
        if (path / "config.json").exists():
            return RunFolder(path)
    msg = f"no run {run!r}: neither {run}/config.json nor runs/{run}/config.json is here; give the run's folder"
    raise ConfigError(msg)


@contextmanager
def connected(run: str) -> Iterator[Connected]:
    """Connect to a run's table.

    Raises:
        ConfigError: there is no such run.
        BrokerError: its broker does not answer and is not ours to start.
    """
    logs.configure(logging.WARNING)
    folder = find(run)
    config = folder.load_config()
    address = Address.load(folder.address)
    live = config.broker.url is not None or is_listening(address)
    store = Store(config.store_path)
    server = lock = None
    if not live:
        lock = folder.lock()
        limits = ServerSettings(max_store=config.broker.max_bytes + config.broker.log_bytes + (1 << 30))
        server = Server(folder.broker, limits)
        address = server.start()
    try:
        connection = Connection(address.for_user(OPERATOR), "reader", REACH_SECONDS)
        try:
            subjects = Subjects(config.run.name)
            table = Table(connection, subjects, store, "reader", direct=config.broker.replicas == 1)
            state = RunState(
                connection, connection.call(ensure_bucket(connection, subjects, config.broker.replicas), 30)
            )
            yield Connected(folder, config, table, state, live)
        finally:
            connection.close()
    finally:
        if server is not None:
            server.stop()
        if lock is not None:
            lock.close()


def children_of(lease: dict[str, Any]) -> dict[str, Any]:
    """The states of a supervisor's children, out of an entry that anybody may have written."""
    children = lease.get("children")
    return children if isinstance(children, dict) else {}
