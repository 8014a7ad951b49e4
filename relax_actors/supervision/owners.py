"""Which node has a role that is there but once: a lease a role, which a node takes before it starts its actors."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import structlog

from broker.bridge import Bridge
from broker.lease import RunState
from relax_actors.errors import ConfigError
from relax_actors.supervision.assignment import SINGLE, Assignment

OWNER_SECONDS = 5.0
LOOK_SECONDS = 1.0
log = structlog.get_logger()


class Owned:
    """The roles of a node that are there but once: no other node has them while it lives.

    Args:
        bridge: the connection.
        state: the run's.
        node: who claims them.
        ttl: seconds after which a claim is forgotten, unless renewed.
    """

    def __init__(self, bridge: Bridge, state: RunState, node: Assignment, ttl: float) -> None:
        self._bridge, self._state, self._node, self._ttl = bridge, state, node, ttl
        self._roles = [role for role in node.roles if role in SINGLE]
        self._entry = {"node": node.number, "name": node.name}
        self._keeping: dict[str, Future[None]] = {}
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
                if owner.get("node") == self._node.number and owner.get("name") == self._node.name:
                    break
                if time.monotonic() > end:
                    where = f"node {owner.get('node')} ({owner.get('name')})"
                    msg = f"{role} runs on {where} already, and there is one of it; start this node without it"
                    raise ConfigError(msg)
                time.sleep(LOOK_SECONDS)

    def renew(self) -> None:
        """Keep them."""
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
        for role in self._roles:
            self._bridge.call(self._state.drop_lease("owner", role), 3)
