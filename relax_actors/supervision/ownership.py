"""Leases of a node: its number, and the roles with a single actor, claimed before its actors start."""

from __future__ import annotations

import time
from collections.abc import Callable
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
        self._roles = node.single
        self._entry = {"node": node.number, "name": node.name, "where": node.where}
        self._role_renewals: dict[str, Future[None]] = {}
        self.node_renewal: Future[None] | None = None
        self.on_lost: Callable[[], object] = lambda: None
        """Called in the connection's thread when another node has taken a role over."""

    def claim(self) -> None:
        """Claim the roles; wait for the leases of a dead node to expire.

        Raises:
            ConfigError: another live node has a role.
        """
        end = time.monotonic() + self._ttl + OWNER_SECONDS
        for role in self._roles:
            while not self._connection.call(self._state.acquire_lease("owner", role, self._entry, self._ttl), 30):
                owner = self._connection.call(self._state.lease("owner", role), 30)
                if owner is None:
                    continue
                if owner == self._entry:
                    break
                if time.monotonic() > end:
                    where = f"node {owner.get('node')} ({owner.get('name')})"
                    msg = f"{role} runs on {where} already, and a run has only one; start this node without {role}"
                    raise ConfigError(msg)
                time.sleep(POLL_SECONDS)

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
        for role in self._roles:
            # While the broker is unreachable the previous renewal is still pending.
            if role not in self._role_renewals or self._role_renewals[role].done():
                self._role_renewals[role] = self._connection.submit(self._renew_role(role))

    async def _renew_role(self, role: str) -> None:
        if not await self._state.renew_held_lease("owner", role, self._entry, self._ttl):
            log.error("role_taken_over", role=role)
            self.on_lost()

    def drop(self) -> None:
        """Release all leases."""

        async def number() -> None:
            if not await self._number_is_taken():
                await self._state.release_lease("node", self._node.number)

        self._connection.call(number(), 3)
        for role in self._roles:
            self._connection.call(self._state.release_lease("owner", role), 3)
