"""The pump of roles that own state: their columns in the order of the stream, first what is there, then what comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pykka
from nats.aio.msg import Msg

from broker.errors import SubjectError
from broker.pull import Follower
from broker.subjects import CellId
from broker.table import Cell
from relax_actors.actor import Context, StatefulRole
from relax_actors.mailbox import Mailbox, ask
from relax_actors.pump import Watch

TICK = 0.5


class FollowPump:
    """Feeds one stateful actor; see `PoolPump` for the arguments. An exception of the role ends the process."""

    def __init__(self, role: StatefulRole, context: Context, mailbox: pykka.ActorRef[Mailbox], watch: Watch) -> None:
        self.role, self.context, self.mailbox, self.watch = role, context, mailbox, watch
        self.handled = 0
        table = context.table
        self._follower = Follower(table.bridge, table.subjects.table_stream, role.follows())

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
            self.handled += len(cells)

    async def _run(self, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.watch.begin([])
        start = loop.time()
        await ask(self.mailbox, work)
        self.watch.busy_seconds += loop.time() - start
        self.watch.busy = False

    def _cell(self, message: Msg) -> tuple[CellId, Cell]:
        sequence = message.metadata.sequence
        try:
            cell_id = self.context.table.subjects.parse(message.subject)
        except SubjectError as error:
            # The stream takes `group.*.*.*`; a subject that is none of ours is nobody's cell.
            self.context.journal.event("malformed_subject", subject=message.subject, error=str(error)[:500])
            cell_id = CellId("unknown", 0)
        return cell_id, Cell(message.subject, sequence.stream if sequence else 0, message.data)
