"""The pump of roles that own state: their columns in the order of the stream, first what is there, then what comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pykka
from nats.aio.msg import Msg

from broker.ordered_consumer import OrderedConsumer
from broker.subjects import CellId
from broker.table import Cell
from relax_actors.errors import SubjectError
from relax_actors.runtime.mailbox import Mailbox, ask
from relax_actors.runtime.role import Context, StatefulRole
from relax_actors.runtime.watchdog import Watch

TICK = 0.5
ANSWER_SECONDS = 5.0
FENCE_SECONDS = 1.0


class FollowPump:
    """Feeds one stateful actor; see `PoolPump` for the arguments. An exception of the role ends the process."""

    def __init__(self, role: StatefulRole, context: Context, mailbox: pykka.ActorRef[Mailbox], watch: Watch) -> None:
        self.role, self.context, self.mailbox, self.watch = role, context, mailbox, watch
        self.handled = 0
        self._looked = float("-inf")
        table = context.table
        self._follower = OrderedConsumer(table.connection, table.subjects.table_stream, role.follows())

    def wake(self) -> None:
        """Look at `stopping` now."""
        self._follower.wake()

    async def run(self, stopping: asyncio.Event) -> None:
        """Recover, then follow until told to stop."""
        follower = self._follower
        history: list[tuple[CellId, Cell]] | None = []
        seen = 0
        async for messages in follower.batches(tick=TICK):
            if stopping.is_set():
                await follower.close()
                return
            # What comes may be of a later life of this actor, and not this one's to act on: one that was stopped and
            # taken for dead has not looked for long.
            if time.monotonic() - self._looked > FENCE_SECONDS:
                await self._give_way()
            cells = [self._cell(m) for m in messages]
            seen += len(cells)
            if history is not None:
                history += cells
                drained = messages[-1].metadata.num_pending == 0 if messages else follower.drained
                if seen < (follower.backlog or 0) and not drained:
                    continue
                cells, history = history, None
                await self._run(partial(self.role.recover, cells))
            elif cells:
                await self._run(partial(self.role.on_cells, cells))
            else:
                await self._idle()
            self.handled += len(cells)

    async def _run(self, work: Callable[[], None]) -> None:
        self.watch.begin([])
        try:
            await ask(self.mailbox, work)
        except Exception:
            # A later life lets go of rows and files that this one misses.
            await self._give_way()
            raise
        self.watch.rest()

    async def _idle(self) -> None:
        self.watch.work()
        await ask(self.mailbox, self.role.idle)
        self.watch.rest()

    async def _give_way(self) -> None:
        """End by `FencedError` if a later life of the actor has begun; a broker that does not answer says nothing."""
        with suppress(TimeoutError):
            if self.context.table.connection.nc.is_connected:
                await asyncio.wait_for(self.context.give_way_async(), ANSWER_SECONDS)
                self._looked = time.monotonic()

    def _cell(self, message: Msg) -> tuple[CellId, Cell]:
        known = message.metadata
        sequence = known.sequence
        try:
            cell_id = self.context.table.subjects.parse(message.subject)
        except SubjectError as error:
            # The stream takes `group.*.*.*`; a subject that is none of ours is nobody's cell.
            self.context.journal.event("malformed_subject", subject=message.subject, error=str(error)[:500])
            cell_id = CellId("unknown", 0)
        stored = known.timestamp.timestamp()
        return cell_id, Cell(message.subject, sequence.stream if sequence else 0, message.data, stored)
