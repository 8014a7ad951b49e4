"""Overflow actors: rollouts of nodes marked as spot, which get rows only above a backlog.

The server keeps rows back from them (JetStream's priority group `overflow`) while fewer rows wait than the backlog, so
that they need no autoscaler and may vanish at any instant. Without a ready actor on another node they get every row, or
a run whose other rollouts are gone would wait for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import nats.errors

from relax_actors.errors import RelaxError
from relax_actors.runtime.context import Context

LOOK_SECONDS = 2.0
"""Interval of looking for actors of the role on nodes that are not marked as spot."""


def has_regular(nodes: Mapping[str, Mapping[str, Any]], role: str) -> bool:
    """Whether a regular node has a ready actor of a role; fields of leases may be forged."""
    for node in nodes.values():
        children = node.get("children")
        for child, state in children.items() if isinstance(children, dict) and not node.get("spot") else ():
            is_ready = isinstance(state, dict) and state.get("phase") == "ready"
            if is_ready and str(child).rpartition(".")[0] == role:
                return True
    return False


class Overflow:
    """Number of rows that must wait before the actor gets any: `backlog`, or none."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._backlog = 0
        self._node: str | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def backlog(self) -> int:
        """Rows that must wait now; 0 for no condition."""
        return self._backlog

    async def start(self) -> None:
        """Look whether the role has other actors, regularly in the background."""
        if self._context.backlog:
            await self._look()
            self._task = asyncio.create_task(self._follow())

    def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._look()

    async def _look(self) -> None:
        with suppress(RelaxError, nats.errors.Error):  # the next look follows
            if not await self._still_there():
                nodes = await self._context.state.leases("node")
                regular = [key for key, node in nodes.items() if has_regular({key: node}, self._context.role)]
                self._node = regular[0].partition(".")[2] if regular else None
            self._backlog = 0 if self._node is None else self._context.backlog

    async def _still_there(self) -> bool:
        """Whether the node found before still has a ready actor, with one request."""
        lease = None if self._node is None else await self._context.state.lease("node", self._node)
        return lease is not None and has_regular({"": lease}, self._context.role)
