"""The pump: between JetStream and a role's thread.

A row goes fetch, join, handle, write, acknowledge. Killed anywhere in between, its message comes back and the write is
repeated or refused. While a row is in hand its deadline is renewed, but only as long as the role shows progress.
"""

from __future__ import annotations

import asyncio
import errno
import traceback
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import nats.errors
import pykka
from nats.aio.msg import Msg

from broker.pull import PullSubscription, is_redelivery
from broker.streams import ensure_consumer, pool_spec
from broker.subjects import CellId, RowId
from broker.table import CALL_DEADLINE
from relax_actors.errors import CodecError, RelaxError, RowError, SubjectError
from relax_actors.messages import Checkpoint, Dropped, Quarantined
from relax_actors.runtime.handler import NOT_THE_ROWS, Handler, Job
from relax_actors.runtime.mailbox import ExitRequestedError, Mailbox, ask
from relax_actors.runtime.role import Context, Role
from relax_actors.runtime.watchdog import Watch

RETRY_SECONDS, PATIENCE = 0.2, 5.0

# What is there whenever a column is there: it need not be waited for by itself.
IMPLIED = {"trajectory": {"prompt"}, "reward": {"prompt", "trajectory"}, "advantage": {"prompt", "trajectory"}}


def waking(inputs: tuple[str, ...], rewards: str = "reward") -> list[str]:
    """The columns whose arrival may complete a row: those that no other of `inputs` implies.

    Args:
        inputs: what a role reads.
        rewards: the column that advantages are made of.
    """
    inputs = tuple(dict.fromkeys(inputs))
    implied: set[str] = {"prompt"} if len(inputs) > 1 else set()
    for name in inputs:
        implied |= IMPLIED.get(name, set())
        if name == "advantage":
            implied |= {rewards} | IMPLIED.get(rewards, set())
    return [name for name in inputs if name not in implied]


class PoolPump:
    """Feeds one actor of a pool.

    Args:
        role: what handles the rows, already set up.
        context: its surroundings.
        mailbox: the thread it runs in.
        watch: looks after its progress.
        fail: called with a traceback to end the process as crashed.
    """

    def __init__(
        self,
        role: Role,
        context: Context,
        mailbox: pykka.ActorRef[Mailbox],
        watch: Watch,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.role, self.context, self.mailbox, self.watch, self.fail = role, context, mailbox, watch, fail
        self.table = context.table
        self.handled = 0
        self._floor = 0
        self._pull: PullSubscription | None = None
        self._fetched: list[Msg] = []
        self._handler = Handler(role, context)
        self._jobs: list[Job] = []
        self._joined = False
        self._ending: asyncio.Task[None] | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self._inputs = role.inputs()
        self._wakes = waking(self._inputs, context.config.advantages.reads)
        self._ack_wait = context.config.supervision.ack_wait
        self._waits_for = f"a row with {' and '.join(self._inputs)}"

    async def run(self, stopping: asyncio.Event) -> None:
        """Pump until told to stop; what is in hand then is finished, what only waits is given back."""
        connection, subjects = self.table.connection, self.table.subjects
        filters = [subjects.column(name, kind) for name in self._wakes for kind in self.role.kinds]
        # Cells purged with a floor may still come as redeliveries: their rows are gone.
        await connection.nc.subscribe(subjects.numbered("checkpoint", "*"), cb=self._on_checkpoint)
        together = max(1, self.role.together())
        # Whoever has a turn on a device gives it back when the rows are through with which it began.
        shares_device = self.context.turn is not nullcontext
        while not stopping.is_set():
            spec = pool_spec(self.context.role, filters, self._ack_wait, max_ack_pending=max(1024, 8 * together))
            await ensure_consumer(connection, subjects.table_stream, spec)
            ahead = self.role.ahead
            credit = max(4, 2 * together) if ahead else together
            pull = PullSubscription(
                connection, subjects.table_stream, self.context.role, credit, self.watch.took, prefetch=ahead
            )
            await pull.start()
            self._pull = pull
            renewing = asyncio.create_task(self._renew(pull))
            try:
                self.watch.end(self._waits_for)
                while not stopping.is_set() and not pull.consumer_lost:
                    messages = await pull.fetch(together, PATIENCE, self.role.linger)
                    again = self._fetched = [message for message in messages if is_redelivery(message)]
                    first = [message for message in messages if not is_redelivery(message)]
                    await self._process(first, joined=not (again or shares_device))
                    # One that comes again may have killed an actor: alone, its neighbours are not blamed for it.
                    for message in again:
                        await self._process([message])
                    self._fetched = []
            finally:
                renewing.cancel()
                await self._give_back(pull)

    def wake(self) -> None:
        """Look at `stopping` now: what waits is for others, though what is in hand may take long."""
        if self._pull is not None:
            self._pull.wake()
            self._ending = asyncio.create_task(self._give_back(self._pull))

    async def _on_checkpoint(self, message: Msg) -> None:
        try:
            found = self.table.read(message.data, Checkpoint, subject=message.subject)
        except CodecError:
            return
        self._floor = max(self._floor, found.floor)

    def _is_below_floor(self, row: RowId) -> bool:
        return row.kind == "group" and row.step < self._floor

    async def _renew(self, pull: PullSubscription) -> None:
        while True:
            await asyncio.sleep(self._ack_wait / 3)
            held = [job.message for job in self._jobs] + self._fetched + pull.buffered
            for message in {id(message): message for message in held}.values():
                await self._quietly(message.in_progress())

    @staticmethod
    async def _quietly(work: Awaitable[Any]) -> None:
        # An acknowledgement that is lost only brings the row again.
        try:
            await work
        except nats.errors.Error:
            return

    async def _process(self, messages: list[Msg], *, joined: bool = False) -> None:
        """Have messages handled; with `joined` also those that come meanwhile, while the role has room."""
        if not messages:
            return
        self._joined = joined
        try:
            if jobs := await self._join_all(messages):
                try:
                    last = await ask(self.mailbox, lambda: self._handler.run(jobs, self._more, self._settled))
                    self._begin_to_finish(last)
                finally:
                    # What was settled before the answer has begun before it.
                    await asyncio.gather(*self._finishing)
                self.watch.end(self._waits_for)
        except ExitRequestedError as error:
            self.fail(error)
        except (RelaxError, OSError) as error:
            self.fail(error)
        finally:
            self._jobs, self._finishing, self._joined = [], set(), False

    async def _join_all(self, messages: list[Msg]) -> list[Job]:
        self._fetched = self._fetched + messages
        jobs = [job for job in await asyncio.gather(*map(self._join, messages)) if job is not None]
        self._fetched = [message for message in self._fetched if message not in messages]
        if jobs:
            self._jobs += jobs
            self.watch.begin([str(job.row) for job in self._jobs])
        return jobs

    def _more(self, most: int) -> list[Job]:
        """In the role's thread: rows that came meanwhile, at once; none if it is to come to an end."""
        pull = self._pull
        # Who generates asks between any two tokens.
        if pull is None or most < 1 or not self._joined or pull.is_requested(most):
            return []
        return self.table.connection.call(self._take_more(pull, most), CALL_DEADLINE)

    async def _take_more(self, pull: PullSubscription, most: int) -> list[Job]:
        # As in `run`: one that comes again is handled alone, once all of these are through.
        return await self._join_all(await pull.fetch_nowait(most))

    async def _give_back(self, pull: PullSubscription) -> None:
        await pull.close()
        for message in pull.drain():
            await self._quietly(message.nak())

    def _settled(self, jobs: list[Job]) -> None:
        """In the role's thread: have what rows gave written, while others are handled."""
        self.table.connection.loop.call_soon_threadsafe(self._begin_to_finish, jobs)

    def _begin_to_finish(self, jobs: list[Job]) -> None:
        task = asyncio.create_task(self._finish_all(jobs))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish_all(self, jobs: list[Job]) -> None:
        try:
            await asyncio.gather(*map(self._finish, jobs))
        except Exception as error:  # noqa: BLE001 nobody waits for it while others are handled
            self.fail(error)
        for job in jobs:
            self._let_go(job)
        if self._jobs:
            self.watch.begin([str(job.row) for job in self._jobs])

    async def _join(self, message: Msg) -> Job | None:
        """The row's other columns; None if it is done, gone, or waits for a column still to come."""
        try:
            cell = self.table.subjects.parse(message.subject)
        except SubjectError as error:
            self.context.journal.event("malformed_subject", subject=message.subject, error=str(error)[:500])
            await self._quietly(message.term())
            return None
        row = cell.row
        again = is_redelivery(message)
        over = self._is_below_floor(row)
        if over and not again:
            self.context.journal.event("stray_cell", subject=message.subject, error="the rows of its step are gone")
        if over or (again and not await self._still_wanted(row, message.subject)):
            await self._quietly(message.ack())
            return None
        cells = {cell.field: message.data}
        others = [name for name in self._inputs if name != cell.field]
        done = [self.role.writes] if len(self._wakes) > 1 and self.role.writes else []
        found = await asyncio.gather(
            *(self.table.get_async(self.table.subject(row, name)) for name in [*others, *done])
        )
        missing = [name for name, other in zip(others, found, strict=False) if other is None]
        if missing or (done and found[-1] is not None):
            if early := sorted(IMPLIED.get(cell.field, set()) & set(missing)):
                await self._too_early(cell, early)
            await self._quietly(message.ack())
            return None
        cells |= {name: other.data for name, other in zip(others, found, strict=False) if other is not None}
        return Job(message, row, cells)

    async def _too_early(self, cell: CellId, missing: list[str]) -> None:
        """Quarantine a row with a column that is there before those it is made of: nobody would come back to it."""
        row = cell.row
        if row.kind == "group":
            last = await self.table.fetch_last_async("checkpoint", Checkpoint)
            self._floor = max(self._floor, last.floor if last is not None else 0)
            if row.step < self._floor:
                return
        error = f"column {cell.field} was written before {' and '.join(missing)}, which it is made of"
        await self._quarantine(row, 1, f"MalformedRow: {error}", "")

    async def _still_wanted(self, row: RowId, subject: str) -> bool:
        """Whether a row delivered again is to be handled; quarantines one that failed too often."""
        ends = [self.role.writes] if self.role.writes else []
        ends += ["dropped", "quarantined"]
        looked_up = [subject, *(self.table.subject(row, name) for name in ends)]
        itself, *ended = await asyncio.gather(*map(self.table.get_async, looked_up))
        # A row whose own cell is gone was purged, with a floor or an evaluated version.
        if itself is None or any(ended):
            return False
        failed = await self.context.state.failures(self.context.role, row)
        limits = self.context.config.supervision
        if failed.count >= limits.max_failures or failed.external_kills >= limits.max_kills:
            await self._quarantine(row, failed.count + failed.external_kills, failed.error, failed.traceback)
            return False
        return True

    async def _finish(self, job: Job) -> None:
        if job.error is not None:
            await self._failed(job, job.error)
            return
        if job.data is not None and not self._is_below_floor(job.row):
            written = await self.table.put_async(self.table.subject(job.row, job.field), job.data)
            if written and job.field == "dropped":
                dropped = self.table.read(job.data, Dropped)
                self.context.journal.event(
                    "row_dropped", row=str(job.row), reason=dropped.reason, detail=dropped.detail
                )
        self.handled += 1
        self._let_go(job)
        await self._quietly(job.message.ack())

    def _let_go(self, job: Job) -> None:
        """Have its deadline renewed no more: that would put off what a nak says of when it comes again."""
        self._jobs = [other for other in self._jobs if other is not job]

    async def _failed(self, job: Job, error: Exception) -> None:
        if isinstance(error, NOT_THE_ROWS) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
            self.fail(error)
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, RowError | CodecError):
            count = job.message.metadata.num_delivered or 1
            final = True
        else:
            count = await self.context.state.count_failure(self.context.role, job.row, text, trace)
            final = count >= self.context.config.supervision.max_failures
        if final:
            await self._quarantine(job.row, count, text, trace)
            self._let_go(job)
            await self._quietly(job.message.ack())
        else:
            self.context.journal.event("row_failed", row=str(job.row), failures=count, error=text, traceback=trace)
            self._let_go(job)
            await self._quietly(job.message.nak(delay=RETRY_SECONDS * count))

    async def _quarantine(self, row: RowId, count: int, error: str, trace: str) -> None:
        subject = self.table.subject(row, "quarantined")
        cell = Quarantined(self.context.role, count, error[:2000], trace[-8000:])
        if await self.table.put_async(subject, self.table.encode(subject, cell)):
            self.context.journal.event("row_quarantined", row=str(row), deliveries=count, error=error, traceback=trace)
