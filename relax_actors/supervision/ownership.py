"""Which node has a number, and a role that is there but once: a lease each, taken before its actors start."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import structlog

from broker.connection import Bridge
from broker.leases import RunState
from relax_actors.errors import ConfigError
from relax_actors.supervision.assignment import Assignment

OWNER_SECONDS = 5.0
LOOK_SECONDS = 1.0
log = structlog.get_logger()


async def is_taken(state: RunState, node: Assignment) -> bool:
    """Whether another node has a node's number."""
    lease = await state.fetch(f"lease.node.{node.number}")
    return isinstance(lease, dict) and isinstance(lease.get("name"), str) and not is_of(lease, node.name, node.where)


def is_of(lease: dict[str, Any], name: str, where: str) -> bool:
    """Whether a lease is a node's own, of this life or the one before."""
    return (lease.get("name"), lease.get("where")) == (name, where)


class Owned:
    """The number of a node, and its roles that are there but once: no other node has them while it lives.

    Who was cut off for longer than `ttl` may find its number taken, and writes that lease no more; `relax node` then
    takes another. Number 0 is that of `relax up`.

    Args:
        bridge: the connection.
        state: the run's.
        node: who claims them.
        ttl: seconds after which a claim is forgotten, unless renewed.
    """

    def __init__(self, bridge: Bridge, state: RunState, node: Assignment, ttl: float) -> None:
        self._bridge, self._state, self._node, self._ttl = bridge, state, node, ttl
        self._roles = node.single
        self._entry = {"node": node.number, "name": node.name, "where": node.where}
        self._keeping: dict[str, Future[None]] = {}
        self._telling: Future[None] | None = None
        self.lost: Callable[[], object] = lambda: None
        """Called, in the bridge's thread, when another node has a role: this one was away for longer than `ttl`."""

    def claim(self) -> None:
        """Claim them; a node that died has them for some seconds still.

        Raises:
            ConfigError: another living node has one.
        """
        end = time.monotonic() + self._ttl + OWNER_SECONDS
        for role in self._roles:
            while not self._bridge.call(self._state.claim_lease("owner", role, self._entry, self._ttl), 30):
                owner = self._bridge.call(self._state.leases(), 30).get(f"owner.{role}", {})
                if owner == self._entry:
                    break
                if owner.keys() != self._entry.keys():  # no node's, and it would never end
                    self._bridge.call(self._state.renew_lease("owner", role, self._entry, self._ttl), 30)
                    break
                if time.monotonic() > end:
                    where = f"node {owner.get('node')} ({owner.get('name')})"
                    msg = f"{role} runs on {where} already, and there is one of it; start this node without it"
                    raise ConfigError(msg)
                time.sleep(LOOK_SECONDS)

    def tell(self, lease: dict[str, Any]) -> None:
        """Keep them, with what the node tells of itself."""
        # The one before waits while the broker is away.
        if self._telling is None or self._telling.done():
            self._telling = self._bridge.submit(self._tell(lease))
        self.renew()

    async def _tell(self, lease: dict[str, Any]) -> None:
        if not await self._is_lost():
            body = {"name": self._node.name, "where": self._node.where, **lease}
            await self._state.renew_lease("node", self._node.number, body, self._ttl)

    async def _is_lost(self) -> bool:
        return self._node.number != 0 and await is_taken(self._state, self._node)

    def renew(self) -> None:
        """Keep the roles."""
        for role in self._roles:
            # The one before waits while the broker is away.
            if role not in self._keeping or self._keeping[role].done():
                self._keeping[role] = self._bridge.submit(self._keep(role))

    async def _keep(self, role: str) -> None:
        if not await self._state.keep_lease("owner", role, self._entry, self._ttl):
            log.error("role_taken_over", role=role)
            self.lost()

    def drop(self) -> None:
        """Let others have them."""

        async def number() -> None:
            if not await self._is_lost():
                await self._state.drop_lease("node", self._node.number)

        self._bridge.call(number(), 3)
        for role in self._roles:
            self._bridge.call(self._state.drop_lease("owner", role), 3)
