"""Pump of stateful roles: feeds their columns in stream order, first the history, then new cells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pykka
from nats.aio.msg import Msg

from broker.ordered_consumer import OrderedConsumer
from broker.permissions import follow_name
from broker.subjects import CellId
from broker.table import Cell
from relax_actors.errors import SubjectError
from relax_actors.runtime.context import Context
from relax_actors.runtime.mailbox import Mailbox, ask
from relax_actors.runtime.stateful_role import StatefulRole
from relax_actors.runtime.watchdog import Watchdog

TICK = 0.5
ANSWER_SECONDS = 5.0
FENCE_SECONDS = 1.0


class FollowerPump:
    """Pump of one stateful actor; arguments as in `PoolPump`. An exception of the role ends the process."""

    def __init__(self, role: StatefulRole, context: Context, mailbox: pykka.ActorRef[Mailbox], watch: Watchdog) -> None:
        self.role, self.context, self.mailbox, self.watch = role, context, mailbox, watch
        self.handled = 0
        self._fence_checked_at = float("-inf")
        table = context.table
        consumer = follow_name(context.role, context.incarnation)
        self._consumer = OrderedConsumer(
            table.connection, table.subjects.table_stream, [], durable=consumer, before_reset=self._check_fence
        )

    def wake(self) -> None:
        """Make `run` check `stopping` now."""
        self._consumer.wake()

    async def run(self, stopping: asyncio.Event) -> None:
        """Feed the history to `recover`, then new cells to `on_cells`, until `stopping` is set."""
        consumer = self._consumer
        history: list[tuple[CellId, Cell]] | None = []
        seen = 0
        async for messages in consumer.batches(tick=TICK):
            if stopping.is_set():
                await consumer.close()
                return
            # The messages may belong to a later incarnation: an actor that was stopped by a signal and replaced has not
            # checked for a long time.
            if time.monotonic() - self._fence_checked_at > FENCE_SECONDS:
                await self._check_fence()
            cells = [self._cell(m) for m in messages]
            seen += len(cells)
            if history is not None:
                history += cells
                drained = messages[-1].metadata.num_pending == 0 if messages else consumer.drained
                if seen < (consumer.backlog or 0) and not drained:
                    continue
                cells, history = history, None
                await self._run(partial(self.role.recover, cells), f"recovering from {_describe(cells)}")
            elif cells:
                await self._run(partial(self.role.on_cells, cells), f"processing {_describe(cells)}")
            else:
                await self._idle()
            self.handled += len(cells)

    async def _run(self, work: Callable[[], None], stage: str) -> None:
        self.watch.start_other_work(stage)
        try:
            await ask(self.mailbox, work)
        except Exception:
            # A later incarnation may have removed the rows and files that are missing here.
            await self._check_fence()
            raise
        self.watch.end_work()

    async def _idle(self) -> None:
        self.watch.start_work("doing background work")
        await ask(self.mailbox, self.role.idle)
        self.watch.end_idle_work()

    async def _check_fence(self) -> None:
        """Raise `FencedError` if a later incarnation has started; skip the check if the broker does not answer."""
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


def _describe(cells: list[tuple[CellId, Cell]]) -> str:
    """Describe cells by their number and the last one."""
    if not cells:
        return "0 cells"
    name = ".".join(cells[-1][1].subject.split(".")[2:])
    return f"{len(cells)} cells up to {name}" if len(cells) > 1 else f"cell {name}"
