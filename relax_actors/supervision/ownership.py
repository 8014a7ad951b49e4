"""Leases of a node: its number, and the roles with a single actor, each claimed before its actor starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import structlog

from broker.connection import Connection
from broker.leases import RunState
from relax_actors.errors import ConfigError
from relax_actors.supervision.assignment import Assignment

OWNER_SECONDS = 5.0
POLL_SECONDS = 1.0
log = structlog.get_logger()


async def is_taken(state: RunState, node: Assignment) -> bool:
    """Whether another node holds this node's number."""
    lease = await state.lease("node", node.number)
    return lease is not None and not is_of(lease, node.name, node.where)


def is_of(lease: dict[str, Any], name: str, where: str) -> bool:
    """Whether a lease belongs to this node, in this incarnation or the previous one."""
    return (lease.get("name"), lease.get("where")) == (name, where)


class NodeLeases:
    """Leases on a node's number and on its roles with a single actor; no other node has them while it lives.

    A node that is cut off for longer than `ttl` may find its number taken; it then stops renewing that lease, and
    `relax node` claims another number. Number 0 belongs to `relax up`.

    Args:
        connection: the connection to the broker.
        state: the run's state.
        node: the node that claims them.
        ttl: seconds after which a lease expires unless renewed.
    """

    def __init__(self, connection: Connection, state: RunState, node: Assignment, ttl: float) -> None:
        self._connection, self._state, self._node, self._ttl = connection, state, node, ttl
        self._held: dict[str, dict[str, Any]] = {}
        """Entry of each role that the node holds."""
        self._claims: dict[str, Future[bool]] = {}
        self._role_renewals: dict[str, Future[None]] = {}
        self.node_renewal: Future[None] | None = None
        self.on_lost: Callable[[], object] = lambda: None
        """Called in the connection's thread when another node has taken a role over."""

    def claim(self) -> None:
        """Claim the roles; wait for the leases of a dead node to expire.

        A role that an operation has moved to another node is not waited for: that node gives it back in its time, and
        `follow` claims it then.

        Raises:
            ConfigError: another live node has a role.
        """
        end = time.monotonic() + self._ttl + OWNER_SECONDS
        for role in self._node.single:
            while not self._connection.call(self._acquire(role, self._entry(role)), 30):
                owner = self._connection.call(self._state.lease("owner", role), 30) or {}
                if owner.get("moved") is True:
                    break
                if owner and time.monotonic() > end:
                    where = f"node {owner.get('node')} ({owner.get('name')})"
                    msg = f"{role} runs on {where} already, and a run has only one; start this node without {role}"
                    raise ConfigError(msg)
                time.sleep(POLL_SECONDS)

    def _entry(self, role: str) -> dict[str, Any]:
        """Return what the lease of a role says: its node, and whether an operation has moved it there."""
        entry = {"node": self._node.number, "name": self._node.name, "where": self._node.where}
        return {**entry, "moved": True} if role in self._node.moved else entry

    async def _acquire(self, role: str, entry: dict[str, Any]) -> bool:
        """Acquire the lease of a role, or recognize it as one of this node; return whether the node holds it."""
        if await self._state.acquire_lease("owner", role, entry, self._ttl):
            self._held[role] = entry
        else:
            owner = await self._state.lease("owner", role)
            if owner is not None and {**owner, "moved": True} == {**entry, "moved": True}:
                self._held[role] = owner
        return role in self._held

    def holds(self, role: str) -> bool:
        """Whether actors of a role may start here: the node holds its lease, or it is no role that needs one."""
        return role in self._held or role not in self._node.single

    def follow(self, node: Assignment, children: Collection[str]) -> None:
        """Claim roles that an operation has moved here, and release those that it took away; call it regularly.

        Args:
            node: the node's roles now.
            children: names of its actors; a role is released when it has none.
        """
        self._node = node
        for role in [role for role in node.single if role not in self._held]:
            if role not in self._claims or self._claims[role].done():
                self._claims[role] = self._connection.submit(self._acquire(role, self._entry(role)))
        for role in [role for role in self._held if role not in node.single and f"{role}.0" not in children]:
            # A renewal that is still pending would write the lease again.
            if role not in self._role_renewals or self._role_renewals[role].done():
                del self._held[role]
                self._connection.submit(self._state.release_lease("owner", role))

    def renew(self, lease: dict[str, Any]) -> None:
        """Renew all leases; `lease` is the node's status, published with its number."""
        # While the broker is unreachable the previous renewal is still pending.
        if self.node_renewal is None or self.node_renewal.done():
            self.node_renewal = self._connection.submit(self._renew_node(lease))
        self.renew_roles()

    async def _renew_node(self, lease: dict[str, Any]) -> None:
        if not await self._number_is_taken():
            body = {"name": self._node.name, "where": self._node.where, **lease}
            await self._state.renew_lease("node", self._node.number, body, self._ttl)

    async def _number_is_taken(self) -> bool:
        return self._node.number != 0 and await is_taken(self._state, self._node)

    def renew_roles(self) -> None:
        """Renew the leases of the roles."""
        for role in list(self._held):
            # While the broker is unreachable the previous renewal is still pending.
            if role not in self._role_renewals or self._role_renewals[role].done():
                self._role_renewals[role] = self._connection.submit(self._renew_role(role))

    async def _renew_role(self, role: str) -> None:
        if not await self._state.renew_held_lease("owner", role, self._held[role], self._ttl):
            log.error("role_taken_over", role=role)
            self.on_lost()

    def drop(self) -> None:
        """Release all leases."""

        async def number() -> None:
            if not await self._number_is_taken():
                await self._state.release_lease("node", self._node.number)

        self._connection.call(number(), 3)
        for role in list(self._held):
            self._connection.call(self._state.release_lease("owner", role), 3)
