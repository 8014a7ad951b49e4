"""Rows that a role of a pool took without writing its column: found, delivered again, then quarantined.

Their messages are acknowledged, by the role or, if a client kept them, by `kept_rows`. No message would bring such a
row to the role again, so its step and the run would wait for it for good. The root, the only process that may change
consumers, looks for these rows when it starts, and after each `supervision.ack_wait` without new weights. It writes a
cell `redeliver-<role>` on the row, which the role's consumer delivers like an input; a row that is lost again is
quarantined, and PromptSource replaces it.

Invariant: an actor stores the column of a row before it acknowledges the row. The root reads how far a consumer is
acknowledged before it lists the cells. So a row whose inputs lie before that point, and which then has no column, is
lost: it is neither undelivered nor being handled. Every step can be repeated: the cells are written once, and a root
that is killed in between finds the same rows again.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from broker.connection import Connection
from broker.leases import RunState
from broker.store import Store
from broker.streams import CONSUMER_SECONDS, ensure_consumer, open_bucket, wait_for_consumer
from broker.subjects import CellId, RowId, Subjects
from broker.table import Table
from relax_actors.config import Config
from relax_actors.messages import Quarantined, Redelivery, Weights
from relax_actors.roles import make_role, role_names
from relax_actors.runtime import Role, StatefulRole
from relax_actors.runtime.join import trigger_columns
from relax_actors.runtime.journal import Journal
from relax_actors.runtime.row import FAILURES, redelivery_column
from relax_actors.runtime.service_role import ServiceRole
from relax_actors.supervision.kept_rows import KeptRows, Nodes, nodes_of, patience_of
from relax_actors.supervision.streams import consumers_of, redelivery_filters

MAX_LOOKUPS = 256
"""Rows of a role that are looked up at once; the others follow in later checks."""
ASK_SECONDS, ROOM_SECONDS = 10.0, 5.0
"""Seconds for one request, and to wait for room in the table."""


@dataclass(frozen=True, slots=True)
class Pool:
    """What a role of a pool reads and writes."""

    role: str
    kinds: tuple[str, ...]
    inputs: tuple[str, ...]
    triggers: tuple[str, ...]
    """The inputs whose arrival is delivered to the role."""
    writes: str


class Loss(Enum):
    """What to do about a lost row."""

    FIRST = "deliver it again"
    SECOND = "quarantine it"


def unanswered(pool: Pool, columns: Mapping[RowId, Collection[str]]) -> list[RowId]:
    """Return the rows that have not ended, have all inputs of a role and lack its column, in order.

    Args:
        pool: the role.
        columns: the columns of each row of the steps and evaluations that are not over.
    """
    return sorted(
        row
        for row, names in columns.items()
        if row.kind in pool.kinds
        and pool.writes not in names
        and not set(FAILURES).intersection(names)
        and set(pool.inputs).issubset(names)
    )


def loss(inputs: Iterable[int], redelivery: int | None, acknowledged: int) -> Loss | None:
    """Tell whether a row that lacks a role's column is lost.

    Args:
        inputs: stream sequences of the inputs that are delivered to the role.
        redelivery: that of the cell that had the row delivered again; None without such a cell.
        acknowledged: sequence up to which the role has acknowledged all messages.
    """
    if max(inputs) > acknowledged:
        return None
    if redelivery is None:
        return Loss.FIRST
    return Loss.SECOND if redelivery <= acknowledged else None


def pool_of(config: Config, name: str, role: Role) -> Pool | None:
    """Describe a role of a pool; None for a role that follows its columns, serves requests or writes no column."""
    if isinstance(role, StatefulRole | ServiceRole) or not role.writes:
        return None
    inputs = tuple(role.inputs(config))
    return Pool(name, role.kinds, inputs, tuple(trigger_columns(inputs, config.advantages.reads)), role.writes)


class LostRows:
    """Finds the lost rows of a run and repairs them. All methods run in one thread, not that of the connection.

    Args:
        table: the run's table, of a user that may change consumers and acknowledge for them.
        config: the run's settings; the classes of its roles are imported.
        nodes: returns the leases of the nodes.
        report: publishes an event.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        table: Table,
        config: Config,
        nodes: Callable[[], Nodes],
        report: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table, self._config, self._report, self._clock = table, config, report, clock
        self._roles = {name: make_role(config, name) for name in role_names(config)}
        pools = (pool_of(config, name, role) for name, role in self._roles.items())
        self._pools = [pool for pool in pools if pool is not None]
        patience = {pool.role: patience_of(config, pool.role, self._roles[pool.role]) for pool in self._pools}
        self._kept = KeptRows(table, nodes, patience, report, clock)
        self._due, self._stalled = float("-inf"), False
        self._seen: list[int] | None = None
        # Stream sequences of cells that were looked up, so that rows that take long are not looked up again.
        self._stored: dict[str, int] = {}
        # Roles whose consumer is known to deliver cells of redeliveries.
        self._extended: set[str] = set()

    def check_when_due(self) -> None:
        """Check at first, and then whenever the run has made no progress for `supervision.ack_wait` seconds.

        Call it every second.
        """
        now = self._clock()
        if now >= self._due:
            self._due = now + self._config.supervision.ack_wait
            seen = self._progress()
            self._stalled, self._seen = self._seen in (None, seen), seen
            if self._stalled:
                self.check()
            else:
                self._kept.forget()
        # Last, since an error here must not end the search for rows that are lost already.
        if self._stalled:
            self._kept.watch()
            if self._kept.release():
                self.check()

    def _progress(self) -> list[int]:
        """Return the stream sequences of the newest weights and of the newest result of an evaluation."""
        kinds = ["weights"] if self._config.eval is None else ["weights", "evaluation"]
        newest = [self._table.get(self._table.subjects.numbered(kind, "*")) for kind in kinds]
        return [0 if cell is None else cell.sequence for cell in newest]

    def check(self) -> None:
        """Find the rows that are lost now, and have them delivered again, or quarantine them."""
        weights = self._table.fetch_last("weights", Weights)
        if weights is None:
            return
        acknowledged = {pool.role: self._acknowledged(pool) for pool in self._pools}
        columns = self._columns(weights.version)
        wanted: set[str] = set()
        for pool in self._pools:
            rows = unanswered(pool, columns)[:MAX_LOOKUPS] if acknowledged[pool.role] else []
            names = {row: [self._table.subject(row, name) for name in pool.triggers] for row in rows}
            again = {row: self._table.subject(row, redelivery_column(pool.role)) for row in rows}
            subjects = [name for row in rows for name in (*names[row], again[row])]
            wanted.update(subjects)
            self._look_up(subjects, acknowledged[pool.role])
            for row in rows:
                inputs = [self._stored[name] for name in names[row] if name in self._stored]
                if len(inputs) == len(names[row]):
                    self._repair(pool, row, inputs, self._stored.get(again[row]), acknowledged[pool.role])
        self._stored = {name: at for name, at in self._stored.items() if name in wanted}

    def _acknowledged(self, pool: Pool) -> int:
        connection, stream = self._table.connection, self._table.subjects.table_stream
        info = connection.call(wait_for_consumer(connection, stream, pool.role, ASK_SECONDS), 2 * ASK_SECONDS)
        return 0 if info.ack_floor is None else info.ack_floor.stream_seq

    def _columns(self, version: int) -> dict[RowId, set[str]]:
        """List the columns of the rows of all steps and evaluations that are not over."""
        table, run = self._table, self._config.run
        due = range(version, min(run.steps, version + self._config.staleness.max + 1))
        batches = table.get_all([table.subjects.numbered("batch", step) for step in due])
        open_steps = [step for step, batch in zip(due, batches, strict=True) if batch is None]
        cells = [cell for step in open_steps for cell in table.list_cells(f"{table.subjects.prefix}.group.{step}.*.*")]
        if self._config.eval is not None:
            over = {cell.step for cell in table.list_cells(table.subjects.numbered("evaluation", "*"))}
            evaluated = table.list_cells(f"{table.subjects.prefix}.eval.*.*.*")
            cells += [cell for cell in evaluated if cell.step not in over]
        return _by_row(cells)

    def _look_up(self, subjects: list[str], acknowledged: int) -> None:
        """Learn where cells are stored; those that may belong to a lost row are looked up each time."""
        unknown = [name for name in subjects if self._stored.get(name, 0) <= acknowledged]
        table = self._table

        async def work() -> None:
            # Not with `direct`, whose answers repeat the headers of a cell's author, which may be forged.
            cells = await asyncio.gather(*(table.get_async(name, direct=False) for name in unknown))
            for name, cell in zip(unknown, cells, strict=True):
                self._stored.pop(name, None)
                if cell is not None:
                    self._stored[name] = cell.sequence

        table.call(work())

    def _repair(self, pool: Pool, row: RowId, inputs: list[int], redelivery: int | None, acknowledged: int) -> None:
        state = loss(inputs, redelivery, acknowledged)
        if state is Loss.FIRST:
            error = f"RowLost: {pool.role} took it without writing column {pool.writes}"
            self._report("row_lost", row=str(row), by=pool.role, error=error)
            self._ensure_filters(pool)
            subject = self._table.subject(row, redelivery_column(pool.role))
            self._table.put(subject, Redelivery(pool.role, max(inputs)))
        elif state is Loss.SECOND:
            error = f"RowLost: {pool.role} took it twice without writing column {pool.writes}"
            self._table.put(self._table.subject(row, "quarantined"), Quarantined(pool.role, 2, error, ""))
            self._report("row_quarantined", row=str(row), deliveries=2, error=error, traceback="")

    def _ensure_filters(self, pool: Pool) -> None:
        """Let the role's consumer deliver cells of redeliveries, before the first one is written."""
        if pool.role in self._extended:
            return
        table, role = self._table, self._roles[pool.role]
        for consumer in consumers_of(self._config, pool.role, role):
            filters = [*(consumer.filter_subjects or []), *redelivery_filters(table.subjects, pool.role, role)]
            wanted = consumer.evolve(filter_subjects=filters)
            table.call(ensure_consumer(table.connection, table.subjects.table_stream, wanted))
        self._extended.add(pool.role)


def _by_row(cells: Iterable[CellId]) -> dict[RowId, set[str]]:
    columns: dict[RowId, set[str]] = defaultdict(set)
    for cell in cells:
        columns[cell.row].add(cell.field)
    return columns


def lost_rows_of(config_now: Callable[[], Config], connection: Connection, journal: Journal) -> Callable[[], None]:
    """Return a function that looks for lost rows, at most once every `supervision.ack_wait` seconds.

    Args:
        config_now: returns the run's configuration; operations add roles to it and remove some.
        connection: of a user that may change consumers and acknowledge for them.
        journal: publishes what is found.
    """
    config = config_now()
    direct = config.broker.replicas == 1
    table = Table(connection, Subjects(config.run.name), Store(config.store_path), "root.0#0", direct=direct)
    table.patience = ROOM_SECONDS
    state = RunState(connection, connection.call(open_bucket(connection, table.subjects), CONSUMER_SECONDS + 1))
    known = config.roles.keys()
    lost = LostRows(table, config, nodes_of(table, state), journal.event)

    def check() -> None:
        nonlocal known, lost
        if (config := config_now()).roles.keys() != known:
            known, lost = config.roles.keys(), LostRows(table, config, nodes_of(table, state), journal.event)
        lost.check_when_due()

    return check
