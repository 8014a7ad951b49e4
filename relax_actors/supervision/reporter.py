"""Reports of a node's supervisor: events of its actors, and the consequences of a death for their rows."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

from broker.connection import Connection
from broker.files import write_private
from broker.leases import RunState
from broker.pull import nak_deliveries
from relax_actors.errors import SubjectError
from relax_actors.runtime.blackbox import BlackBox, Snapshot
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.row import parse_row
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.spec import Blame, Exit, Failure
from relax_actors.supervision.supervisor import GiveUp


class Reporter:
    """Publishes what happens to the actors of a node, and counts deaths against the rows that were being handled."""

    def __init__(self, folder: RunFolder, connection: Connection, state: RunState, journal: Journal) -> None:
        self._folder, self._connection, self._state, self._journal = folder, connection, state, journal
        self._stream = journal.subjects.table_stream
        self._details: dict[str, str] = {}
        self.failure: Failure | None = None
        """Why the run cannot continue, if it cannot."""

    def started(self, child: str, pid: int, starts: int) -> None:
        """Publish the start of an actor."""
        role, n = split_child_id(child)
        kind = "started" if starts == 1 else "restarted"
        self._journal.event(kind, role=role, n=n, pid=pid, starts=starts)

    def ready(self, child: str, seconds: float) -> None:
        """Publish that an actor is ready."""
        role, n = split_child_id(child)
        self._journal.event("ready", role=role, n=n, seconds=round(seconds, 3))

    def ended(self, child: str, outcome: Exit, last: Snapshot) -> None:
        """Publish the end of an actor, and release its rows."""
        role, n = split_child_id(child)
        if outcome.normal:
            self._journal.event("stopped", role=role, n=n)
            # An actor that was killed while it finished its rows: they go to the others at once.
            if last.deliveries:
                self._connection.submit(nak_deliveries(self._connection, self._stream, role, last.deliveries))
            return
        self._details[child] = outcome.detail or outcome.reason
        self._journal.event(
            "crashed",
            role=role,
            n=n,
            reason=outcome.reason,
            blame=outcome.blame,
            rows=list(last.rows),
            traceback=outcome.detail[-4000:],
        )
        # A death without blame, e.g. by a full disk, needs time to pass: the rows wait for their redelivery deadline.
        if outcome.blame is not Blame.NONE:
            self._connection.submit(self._settle(role, outcome, last))

    async def _settle(self, role: str, outcome: Exit, last: Snapshot) -> None:
        """Count a death against the rows that were being handled, then return the actor's deliveries to its pool."""
        external = outcome.blame is Blame.EXTERNAL
        for text in last.rows:
            try:
                row = parse_row(text)
            except SubjectError:
                continue  # the actor writes what it likes
            await self._state.count_failure(role, row, outcome.reason, outcome.detail, external_kill=external)
        await nak_deliveries(self._connection, self._stream, role, last.deliveries)

    def release_deliveries(self, child: str) -> None:
        """Return the deliveries of an actor that died with a previous supervisor to its pool."""
        box = BlackBox(self._folder.black_box(child))
        taken = box.read_with_deliveries().deliveries
        box.close()
        self._connection.submit(nak_deliveries(self._connection, self._stream, split_child_id(child)[0], taken))

    def gave_up(self, pool: str, report: GiveUp) -> None:
        """Publish that a pool's supervisor gave up, and write the report."""
        detail = self._details.get(report.child, "")
        self._journal.event("gave_up", role=pool, n=split_child_id(report.child)[1], reason=report.reason)
        body = {"role": pool, "child": report.child, "reason": report.reason, "traceback": detail, "time": time.time()}
        self.failure = self.failure or Failure(report.child, report.reason, detail)
        # On a full disk the report reaches the root by the status pipe only.
        with suppress(OSError):
            write_private(self._folder.report, json.dumps(body, indent=1))


def supervision_metric(children: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the metric with the restarts of a supervisor's children that were restarted."""
    return {"kind": "supervision", "restarts": {name: s["restarts"] for name, s in children.items() if s["restarts"]}}


def split_child_id(child: str) -> tuple[str, int]:
    """Split the id of a child into its role and number."""
    role, _, n = child.rpartition(".")
    return role, int(n)
