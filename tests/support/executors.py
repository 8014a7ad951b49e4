"""A root's executor of operations without a run: nodes are leases, and the clock is that of the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.connection import Connection
from broker.leases import RunState
from broker.streams import ensure_bucket
from broker.table import Table
from relax_actors.config import Config, load_config
from relax_actors.messages.operations import OperationPlan, OperationRequest
from relax_actors.operations import Operation, OperationLog, State
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.assignment import whole
from relax_actors.supervision.operation_times import OperationTimes
from relax_actors.supervision.operations import Operations
from relax_actors.supervision.streams import publish_run
from tests.support.running import SUPPORT, TINY


@dataclass
class Executor:
    """A root's executor of operations, and what it reads and writes."""

    table: Table
    state: RunState
    folder: RunFolder
    seconds: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    open_run: Callable[[Config], None] = lambda _: None

    def root(self) -> Operations:
        """Start a root, with the configuration that is saved."""
        times = OperationTimes(lambda: self.seconds)
        return Operations(self.table, self.state, self.folder, self._report, times, self.open_run)

    def _report(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def node(self, number: int = 0, name: str = "main", *actors: str, **state: Any) -> None:
        """Write the lease of a node with ready actors; `state` is more that it says of each."""
        children = {actor: {"phase": "ready", "pid": 5, "restarts": 0, **state} for actor in actors}
        lease = {"name": name, "where": name, "since": time.time() + 60, "pid": 1, "children": children}
        self.table.call(self.state.renew_lease("node", number, lease, 600))

    def operation(self, number: int) -> Operation:
        """Return an operation as it is now."""
        return OperationLog(self.table).read().operations[number]

    def replicas(self, role: str = "rollout") -> int:
        """Return the number of actors of a role that the run's folder says."""
        section = getattr(self.folder.load_config(), role)
        return int(section.replicas)


def saved_run(table: Table, connection: Connection, root: Path, *settings: str, toml: Path = TINY) -> Executor:
    """Save the configuration of a run, and return its executor."""
    folder = RunFolder(root)
    config = load_config(toml, [f"run.name={table.subjects.run}", f"run.folder={folder.root}", *settings])
    folder.root.mkdir(exist_ok=True)
    folder.save_config(config, str(SUPPORT))
    whole(config).save(folder)
    state = RunState(connection, connection.call(ensure_bucket(connection, table.subjects), 20))
    connection.call(publish_run(state, config, str(SUPPORT)), 20)
    return Executor(table, state, folder)


def begun(run: Executor, request: OperationRequest, state: State, plan: OperationPlan) -> int:
    """Record an operation in a state, as a former root left it."""
    log = OperationLog(run.table)
    number = log.request(request).id
    assert log.advance(number, state, plan=plan) is not None
    return number
