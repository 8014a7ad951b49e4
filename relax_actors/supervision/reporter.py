"""What a node's supervisor tells the run of its actors, and what follows from a death for the rows in hand."""

from __future__ import annotations

import json
import time
from contextlib import suppress

from broker.connection import Connection
from broker.files import write_private
from broker.leases import RunState
from broker.pull import nak_deliveries
from broker.subjects import RowId
from relax_actors.runtime.blackbox import BlackBox, Reading
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.spec import Blame, Exit, Failure
from relax_actors.supervision.supervisor import GiveUp


class Reporter:
    """Tells the run what happens to its actors, and counts deaths against the rows that were in hand."""

    def __init__(self, folder: RunFolder, connection: Connection, state: RunState, journal: Journal) -> None:
        self._folder, self._connection, self._state, self._journal = folder, connection, state, journal
        self._stream = journal.subjects.table_stream
        self._details: dict[str, str] = {}
        self.failure: Failure | None = None
        """Why the run cannot go on, if it cannot."""

    def started(self, child: str, pid: int, starts: int) -> None:
        """An actor's process was started."""
        role, n = split(child)
        kind = "started" if starts == 1 else "restarted"
        self._journal.event(kind, role=role, n=n, pid=pid, starts=starts)

    def ready(self, child: str, seconds: float) -> None:
        """An actor is ready."""
        role, n = split(child)
        self._journal.event("ready", role=role, n=n, seconds=round(seconds, 3))

    def ended(self, child: str, outcome: Exit, last: Reading) -> None:
        """An actor's process is gone."""
        role, n = split(child)
        if outcome.normal:
            self._journal.event("stopped", role=role, n=n)
            return
        self._details[child] = outcome.detail or outcome.reason
        self._journal.event(
            "crashed",
            role=role,
            n=n,
            reason=outcome.reason,
            rows=list(last.rows),
            traceback=outcome.detail[-4000:],
        )
        # What made an actor end through no fault of its rows needs time to pass: they wait for their lease to end.
        if outcome.blame is not Blame.NOBODY:
            self._connection.submit(self._settle(role, outcome, last))

    async def _settle(self, role: str, outcome: Exit, last: Reading) -> None:
        """Count a death against the rows in hand, then let all that the actor had taken go to others at once."""
        outside = outcome.blame is Blame.OUTSIDE
        for text in last.rows:
            row = RowId.parse(text)
            await self._state.count_failure(role, row, outcome.reason, outcome.detail, external_kill=outside)
        await nak_deliveries(self._connection, self._stream, role, last.taken)

    def inherit(self, child: str) -> None:
        """What an actor had taken when an earlier supervisor died, and it with that: let it go to others."""
        box = BlackBox(self._folder.box(child))
        taken = box.read_whole().taken
        box.close()
        self._connection.submit(nak_deliveries(self._connection, self._stream, split(child)[0], taken))

    def gave_up(self, pool: str, report: GiveUp) -> None:
        """A role cannot be kept up."""
        detail = self._details.get(report.child, "")
        self._journal.event("gave_up", role=pool, n=split(report.child)[1], reason=report.reason)
        body = {"role": pool, "child": report.child, "reason": report.reason, "traceback": detail, "time": time.time()}
        self.failure = self.failure or Failure(report.child, report.reason, detail)
        # On a full disk the root hears of it by the status pipe only.
        with suppress(OSError):
            write_private(self._folder.report, json.dumps(body, indent=1))


def split(child: str) -> tuple[str, int]:
    """Role and number of an actor's id."""
    role, _, n = child.rpartition(".")
    return role, int(n)
