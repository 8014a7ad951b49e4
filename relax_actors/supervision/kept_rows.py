"""Rows that a client keeps from a pool of actors: their messages are acknowledged in the place of the role.

Any client with a role's credentials can take a message and extend its deadline for good, or return it with a delay of
centuries, which outlives its connection. No actor would get the row again. Acknowledged, it is one of the lost rows,
which `lost_rows` repairs.

Invariant: a message is acknowledged only if it was delivered before a time in which the role had actors that were ready
and all of them waited, for longer than an honest actor can keep a message unseen. Nodes tell this by their leases, from
the black boxes of their actors: the role's credentials cannot forge it. So a row that an actor works on is left alone,
however long it takes. A message that is acknowledged by mistake costs one more delivery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nats.js.api import ConsumerInfo

from broker.leases import RunState
from broker.pull import acknowledge
from broker.table import Table
from relax_actors.config import Config
from relax_actors.runtime import Role
from relax_actors.runtime.finish import RETRY_SECONDS

MAX_RELEASED = 256
"""Messages of a role that are acknowledged at once; the others follow later."""
GAP_SECONDS = 5.0
"""Time between two looks at the leases after which nothing is known about the time between them."""
ASK_SECONDS, RELEASE_SECONDS = 10.0, 30.0
"""Seconds for one request, and for the messages of one role."""
Nodes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Idle:
    """Time in which all actors of a role waited."""

    since: float
    delivered: int
    """Stream sequence of the last message that had been delivered to the role when it began."""


def idle_roles(nodes: Nodes, roles: Collection[str]) -> set[str]:
    """Return the roles that have actors which are ready, and all of whose actors are known to wait.

    Args:
        nodes: leases of the nodes, whose fields may be forged.
        roles: roles of pools.
    """
    works: dict[str, list[bool]] = {role: [] for role in roles}
    for node in nodes.values():
        children = node.get("children")
        for child, state in children.items() if isinstance(children, dict) else ():
            role = str(child).rpartition(".")[0]
            if role in works and isinstance(state, dict):
                idle = state.get("works") is False
                if not idle or state.get("phase") == "ready":
                    works[role].append(not idle)
    return {role for role, busy in works.items() if busy and not any(busy)}


def longest_unseen(config: Config, role: Role) -> float:
    """Return the seconds that a message may be with an honest actor, or wait for one, while all leases say idle.

    It waits for its redelivery after the actor's death, or until a failed row is tried again; it arrives and waits for
    further ones; and the lease that shows that it is being handled comes late.
    """
    settings = config.supervision
    retries = RETRY_SECONDS * settings.max_failures * (settings.max_failures + 1) / 2
    return settings.ack_wait + max(2.0, settings.heartbeat) + role.batch_wait + retries


class KeptRows:
    """Watches the pools of a run that makes no steps, and acknowledges what is kept from them.

    All methods run in one thread, not that of the connection. Times are seconds on the monotonic clock.

    Args:
        table: the run's table, of a user that may acknowledge for every consumer.
        nodes: returns the leases of the nodes.
        patience: by role of a pool, the seconds for which it must be idle.
        report: publishes an event.
    """

    def __init__(
        self,
        table: Table,
        nodes: Callable[[], Nodes],
        patience: Mapping[str, float],
        report: Callable[..., None],
    ) -> None:
        self._table, self._nodes, self._patience, self._report = table, nodes, patience, report
        self._idle: dict[str, Idle] = {}
        self._seen_at = float("-inf")

    def forget(self) -> None:
        """Forget what was seen: the run goes on, and is not watched meanwhile."""
        self._idle = {}

    def watch(self, now: float) -> None:
        """Look at what the actors do; call it every second while the run makes no steps."""
        idle = idle_roles(self._nodes(), self._patience)
        if now - self._seen_at > GAP_SECONDS:
            self.forget()
        self._idle = {role: self._idle.get(role) or Idle(now, self._delivered(role)) for role in sorted(idle)}
        self._seen_at = now

    def release(self, now: float) -> bool:
        """Acknowledge the messages that were kept for too long, in the place of the role; return whether any was."""
        released = False
        for role, idle in list(self._idle.items()):
            if now - idle.since >= self._patience[role]:
                del self._idle[role]
                if rows := self._release(role, idle.delivered):
                    released = True
                    error = f"RowKept: its message was not acknowledged for {now - idle.since:.0f} s by role {role}"
                    error += ", all of whose actors waited"
                    for row in rows:
                        self._report("row_kept", row=row, by=role, error=error)
        return released

    def _delivered(self, role: str) -> int:
        info = self._table.connection.call(self._info(role), ASK_SECONDS + 1)
        return 0 if info.delivered is None else info.delivered.stream_seq

    async def _info(self, role: str) -> ConsumerInfo:
        connection, stream = self._table.connection, self._table.subjects.table_stream

        async def ask() -> ConsumerInfo:
            found: ConsumerInfo = await connection.js.consumer_info(stream, role)
            return found

        return await connection.retry(ask, f"look at consumer {role}", ASK_SECONDS)

    def _release(self, role: str, delivered: int) -> list[str]:
        """Acknowledge a role's messages up to a sequence, and return their rows.

        The first message behind the point up to which all are acknowledged is not acknowledged.
        """
        table, rows = self._table, list[str]()

        async def work() -> None:
            last = 0
            while len(rows) < MAX_RELEASED:
                info = await self._info(role)
                after = max(last, 0 if info.ack_floor is None else info.ack_floor.stream_seq) + 1
                filters = info.config.filter_subjects or [str(info.config.filter_subject)]
                found = await asyncio.gather(*(table.find_next_async(name, after) for name in filters))
                first = min((m for m in found if m is not None), key=lambda m: m.seq or 0, default=None)
                if first is None or first.seq is None or first.seq > delivered:
                    return
                last = first.seq
                await acknowledge(table.connection, table.subjects.table_stream, role, last)
                # Not parsed: a stray cell may have a subject that names no row.
                rows.append(str(first.subject).removeprefix(f"{table.subjects.prefix}.").rpartition(".")[0])

        table.connection.call(work(), RELEASE_SECONDS)
        return rows


def nodes_of(table: Table, state: RunState) -> Callable[[], Nodes]:
    """Return a function that reads the leases of the nodes."""
    return lambda: table.connection.call(state.leases("node"), ASK_SECONDS)
