"""Pump of stateful roles: their columns in stream order, history first, then new cells."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TypeAlias

import pykka
from nats.aio.msg import Msg

from broker.ordered_consumer import OrderedConsumer
from broker.permissions import follow_name
from broker.subjects import CellId
from broker.table import Cell
from relax_actors.errors import SubjectError
from relax_actors.runtime.pump import Pump
from relax_actors.runtime.role_actor import Idle, Recover, RoleActor, TakeCells
from relax_actors.runtime.stateful_role import StatefulRole
from relax_actors.runtime.watchdog import Watchdog

TICK = 0.5
ANSWER_SECONDS = 5.0
FENCE_SECONDS = 1.0
Cells: TypeAlias = list[tuple[CellId, Cell]]


class FollowerPump(Pump[Recover | TakeCells]):
    """Pump of one stateful actor; see `PoolPump`. The role's exceptions end the process."""

    def __init__(self, role: StatefulRole, actor: pykka.ActorRef[RoleActor], watch: Watchdog) -> None:
        self.context, self.actor, self.watch = role.context, actor, watch
        self._handled = 0
        self._has_recovered = self._is_drained = False
        self._fence_checked_at = float("-inf")
        table, consumer = self.context.table, follow_name(self.context.role, self.context.incarnation)
        self._consumer = OrderedConsumer(
            table.connection, table.subjects.table_stream, [], durable=consumer, before_reset=self._check_fence
        )
        self.context.has_work = lambda: self._consumer.has_messages
        self._batches = self._consumer.batches(tick=TICK)

    @property
    def handled(self) -> int:
        """Cells processed so far, without the history."""
        return self._handled

    def wake(self) -> None:
        """Make `fetch` return."""
        self._consumer.wake()

    async def fetch(self) -> Recover | TakeCells | None:
        """Fetch the whole history at first, then new cells."""
        if not self._has_recovered:
            return await self._fetch_history()
        cells = await self._next_cells()
        return TakeCells(cells) if cells else None

    async def handle(self, work: Recover | TakeCells) -> None:
        """Have the role recover from the history, or process new cells."""
        verb = "recovering from" if isinstance(work, Recover) else "processing"
        self.watch.start_other_work(f"{verb} {_describe(work.cells)}")
        try:
            await self.actor.ask(work, block=False)
        except Exception:
            # A later incarnation may have removed the rows and files that are missing here.
            await self._check_fence()
            raise
        self.watch.end_work()
        self._has_recovered = True
        if isinstance(work, TakeCells):
            self._handled += len(work.cells)

    async def idle(self) -> None:
        """Have the role do background work."""
        self.watch.start_work("doing background work")
        await self.actor.ask(Idle(), block=False)
        self.watch.end_idle_work()

    async def close(self) -> None:
        """End the subscription."""
        await self._consumer.close()

    async def _fetch_history(self) -> Recover | None:
        history: Cells = []
        while True:
            history += await self._next_cells()
            if self.context.stopping():
                return None
            if self._is_drained or len(history) >= (self._consumer.backlog or 0):
                return Recover(history)

    async def _next_cells(self) -> Cells:
        """Return the next cells; none after `TICK` seconds, or if the actor shall stop."""
        messages = await anext(self._batches)
        if self.context.stopping():
            return []
        # The messages may belong to a later incarnation: an actor that was stopped by a signal and replaced has not
        # checked for a long time.
        if time.monotonic() - self._fence_checked_at > FENCE_SECONDS:
            await self._check_fence()
        self._is_drained = messages[-1].metadata.num_pending == 0 if messages else self._consumer.drained
        return [self._cell(message) for message in messages]

    async def _check_fence(self) -> None:
        """Raise `FencedError` if a later incarnation started; skipped without a broker."""
        with suppress(TimeoutError):
            if self.context.table.connection.nc.is_connected:
                await asyncio.wait_for(self.context.raise_if_fenced_async(), ANSWER_SECONDS)
                self._fence_checked_at = time.monotonic()

    def _cell(self, message: Msg) -> tuple[CellId, Cell]:
        known = message.metadata
        sequence = known.sequence
        try:
            cell_id = self.context.table.subjects.parse(message.subject)
        except SubjectError as error:
            # The stream accepts `group.*.*.*`, so subjects that name no cell can arrive.
            self.context.journal.event("malformed_subject", subject=message.subject, error=str(error)[:500])
            cell_id = CellId("unknown", 0)
        stored = known.timestamp.timestamp()
        return cell_id, Cell(message.subject, sequence.stream if sequence else 0, message.data, stored)


def _describe(cells: Cells) -> str:
    """Describe cells by their number and the last one."""
    if not cells:
        return "0 cells"
    name = ".".join(cells[-1][1].subject.split(".")[2:])
    return f"{len(cells)} cells up to {name}" if len(cells) > 1 else f"cell {name}"
