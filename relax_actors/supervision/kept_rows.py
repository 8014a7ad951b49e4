"""Rows that a client keeps from a pool of actors: their messages are acknowledged in the place of the role.

Any client with a role's credentials can take a message and extend its deadline for good, or return it with a delay of
centuries, which outlives its connection. No actor would get the row again. Acknowledged, it is one of the lost rows,
which `lost_rows` repairs.

Invariant: a message is acknowledged only if it was delivered before a time in which all actors of the role were ready
and waited, and none of them was replaced. That time is longer than an honest actor can keep a message unseen. Nodes
tell it by their leases, from the black boxes of their actors: the role's credentials cannot forge it. So a row that an
actor works on is left alone, however long it takes. A row's first message that is taken back by mistake costs one more
delivery. A redelivery that is taken back by mistake costs the row, which is then quarantined; so it takes much longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nats.js.api import ConsumerInfo, RawStreamMsg

from broker.leases import RunState
from broker.pull import acknowledge
from broker.streams import wait_for_consumer
from broker.table import Table
from relax_actors.config import Config
from relax_actors.roles import section_of
from relax_actors.runtime import Role
from relax_actors.runtime.finish import RETRY_SECONDS
from relax_actors.runtime.row import redelivery_column

MAX_AT_ONCE = 256
"""Stream sequences that are acknowledged at once."""
GAP_SECONDS = 5.0
"""Longest gap between two looks at the leases; after a longer one the idle time starts again."""
ASK_SECONDS, RELEASE_SECONDS = 10.0, 30.0
"""Seconds for one request, and for the messages of one role; what is left then follows later."""
AGAIN_FACTOR, AGAIN_SECONDS = 4.0, 60.0
"""Patience with a redelivery, in those with a row's first message, and at least."""
Nodes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds for which a pool must be idle.

    Attributes:
        first: before the first message of a row is taken back.
        drain: for which an actor may live that no node reports any more; so long nothing is known of its pool.
    """

    first: float
    drain: float

    @property
    def again(self) -> float:
        """Seconds before a redelivery is taken back."""
        return max(AGAIN_SECONDS, AGAIN_FACTOR * self.first)


@dataclass(slots=True)
class Idle:
    """Time in which all actors of a role waited."""

    since: float
    delivered: int
    """Stream sequence of the last message that had been delivered to the role when it began."""
    due: float
    """When the role's messages are taken back."""


@dataclass(frozen=True, slots=True)
class Actor:
    """What a node tells about one actor."""

    process: str
    """Differs between two processes of the actor."""
    idle: bool
    """Whether the actor is ready, and known to wait."""


def actors_of(nodes: Nodes, roles: Collection[str]) -> dict[str, dict[str, Actor]]:
    """Return the actors that have not ended, by role and name.

    Args:
        nodes: leases of the nodes, whose fields may be forged.
        roles: roles of pools.
    """
    actors: dict[str, dict[str, Actor]] = {role: {} for role in roles}
    for node in nodes.values():
        children = node.get("children")
        for child, value in children.items() if isinstance(children, dict) else ():
            role, state = str(child).rpartition(".")[0], value if isinstance(value, dict) else {}
            if role in actors and state.get("phase") != "ended":
                process = repr([node.get("pid"), node.get("since"), state.get("pid"), state.get("restarts")])
                idle = state.get("phase") == "ready" and state.get("works") is False
                actors[role][str(child)] = Actor(process, idle)
    return actors


def idle_roles(actors: Mapping[str, Mapping[str, Actor]]) -> set[str]:
    """Return the roles that have actors, all of which are idle."""
    return {role for role, pool in actors.items() if pool and all(actor.idle for actor in pool.values())}


def longest_unseen(config: Config, role: Role) -> float:
    """Return the seconds that a message may be with an honest actor, or wait for one, while all leases say idle.

    Sum of the redelivery deadline, the lease's lifetime, the batch wait and all retry delays.
    """
    settings = config.supervision
    retries = RETRY_SECONDS * settings.max_failures * (settings.max_failures + 1) / 2
    return settings.ack_wait + max(2.0, settings.heartbeat) + role.batch_wait + retries


def patience_of(config: Config, name: str, role: Role) -> Patience:
    """Return how long a pool must be idle, by the run's settings."""
    return Patience(longest_unseen(config, role), section_of(config, name).deadline + config.supervision.shutdown)


class KeptRows:
    """Watches the pools of a run that makes no steps, and acknowledges what is kept from them.

    All methods run in one thread, not that of the connection.

    Args:
        table: the run's table, of a user that may acknowledge for every consumer.
        nodes: returns the leases of the nodes.
        patience: by role of a pool, how long it must be idle.
        report: publishes an event.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        table: Table,
        nodes: Callable[[], Nodes],
        patience: Mapping[str, Patience],
        report: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table, self._nodes, self._patience, self._report = table, nodes, patience, report
        self._clock = clock
        self._idle: dict[str, Idle] = {}
        self._processes: dict[str, dict[str, str]] = {role: {} for role in patience}
        # Until when an actor may live that no node reports any more.
        self._missing: dict[str, dict[str, float]] = {role: {} for role in patience}
        self._seen_at = float("-inf")

    def forget(self) -> None:
        """Forget the idle times, since the run goes on, and look only which actors there are."""
        self._idle = {}
        self._look()

    def watch(self) -> None:
        """Look at what the actors do; call it every second while the run makes no steps."""
        for role in sorted(self._look() - self._idle.keys()):
            delivered = self._info(role).delivered
            since = self._clock()
            sequence = 0 if delivered is None else delivered.stream_seq
            self._idle[role] = Idle(since, sequence, since + self._patience[role].first)

    def _look(self) -> set[str]:
        """Read the leases, forget the idle times of busy pools, and return the idle pools."""
        now = self._clock()
        if now - self._seen_at > GAP_SECONDS:
            self._idle = {}
        actors = actors_of(self._nodes(), self._patience)
        self._seen_at = now
        for role, pool in actors.items():
            processes, before = {name: actor.process for name, actor in pool.items()}, self._processes[role]
            # A node may have vanished without its actors, which finish their rows. The successor of an actor fences it.
            gone = dict.fromkeys(before.keys() - processes.keys(), now + self._patience[role].drain)
            missing = self._missing[role] | gone
            self._missing[role] = {name: end for name, end in missing.items() if name not in processes and now < end}
            if processes != before:
                # What a dead actor held is delivered again only after its deadline.
                self._idle.pop(role, None)
            self._processes[role] = processes
        idle = {role for role in idle_roles(actors) if not self._missing[role]}
        self._idle = {role: time for role, time in self._idle.items() if role in idle}
        return idle

    def release(self) -> bool:
        """Acknowledge the messages that were kept for too long, in the place of the role; return whether any was."""
        now, released = self._clock(), False
        for role, idle in list(self._idle.items()):
            if now >= idle.due:
                del self._idle[role]
                released = self._release(role, idle, now - idle.since) or released
        return released

    def _release(self, role: str, idle: Idle, seconds: float) -> bool:
        """Acknowledge a role's messages up to a sequence; return whether any was pending.

        The first pending one lies behind the point up to which all are acknowledged, and no later than the next message
        that exists: those in between are of other roles, or of rows that were removed since.
        """
        end, last = time.monotonic() + RELEASE_SECONDS, 0
        info = self._info(role)
        at_first = pending = info.num_ack_pending or 0
        while pending and time.monotonic() < end:
            after = max(last, 0 if info.ack_floor is None else info.ack_floor.stream_seq) + 1
            if after > idle.delivered:
                break
            message = self._next(info, after)
            sequence = idle.delivered + 1 if message is None or message.seq is None else message.seq
            subject = "" if message is None else str(message.subject)
            if after < sequence:
                sequences = range(after, min(sequence, idle.delivered + 1, after + MAX_AT_ONCE))
            elif subject.endswith(f".{redelivery_column(role)}") and seconds < self._patience[role].again:
                idle.due = idle.since + self._patience[role].again
                self._idle[role] = idle
                break
            else:
                sequences = range(sequence, sequence + 1)
            self._acknowledge(role, sequences)
            last, info, before = sequences[-1], self._info(role), pending
            pending = info.num_ack_pending or 0
            if last == sequence and pending < before:
                self._report_kept(role, subject, seconds)
        return pending < at_first

    def _report_kept(self, role: str, subject: str, seconds: float) -> None:
        # Not parsed: a stray cell may have a subject that names no row.
        row = subject.removeprefix(f"{self._table.subjects.prefix}.").rpartition(".")[0]
        error = f"RowKept: all actors of role {role} waited for {seconds:.0f} s, and its message was not acknowledged"
        self._report("row_kept", row=row, by=role, error=f"{error}. Look for another program with its credentials")

    def _acknowledge(self, role: str, sequences: Iterable[int]) -> None:
        connection, stream = self._table.connection, self._table.subjects.table_stream

        async def work() -> None:
            await asyncio.gather(*(acknowledge(connection, stream, role, sequence) for sequence in sequences))

        connection.call(work(), RELEASE_SECONDS)

    def _next(self, info: ConsumerInfo, after: int) -> RawStreamMsg | None:
        """Return the first message at or behind a sequence that a consumer delivers."""
        filters = info.config.filter_subjects or [str(info.config.filter_subject)]

        async def work() -> list[RawStreamMsg | None]:
            return await asyncio.gather(*(self._table.find_next_async(name, after) for name in filters))

        messages = self._table.connection.call(work(), RELEASE_SECONDS)
        return min((m for m in messages if m is not None), key=lambda m: m.seq or 0, default=None)

    def _info(self, role: str) -> ConsumerInfo:
        connection, stream = self._table.connection, self._table.subjects.table_stream
        return connection.call(wait_for_consumer(connection, stream, role, ASK_SECONDS), 2 * ASK_SECONDS)


def nodes_of(table: Table, state: RunState) -> Callable[[], Nodes]:
    """Return a function that reads the leases of the nodes."""
    return lambda: table.connection.call(state.leases("node"), ASK_SECONDS)
