"""Pump of a pool actor: fetch, join, handle, write, acknowledge.

If the actor is killed at any point, the message is redelivered, and the write is repeated or refused. The message's
acknowledgement deadline is extended while its row is handled; the watchdog ends a process that makes no progress.
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
from relax_actors.runtime.context import Context
from relax_actors.runtime.handler import BLAMELESS_ERRORS, Handler, Job
from relax_actors.runtime.mailbox import ExitRequestedError, Mailbox, ask
from relax_actors.runtime.role import Role
from relax_actors.runtime.watchdog import Watchdog

RETRY_SECONDS, PATIENCE = 0.2, 5.0

# Columns that must exist once the key exists, so their own arrival need not trigger the row.
IMPLIED = {"trajectory": {"prompt"}, "reward": {"prompt", "trajectory"}, "advantage": {"prompt", "trajectory"}}


def trigger_columns(inputs: tuple[str, ...], rewards: str = "reward") -> list[str]:
    """Return the columns whose arrival may complete a row: those that no other column of `inputs` implies.

    Args:
        inputs: columns that a role reads.
        rewards: column that advantages are computed from.
    """
    inputs = tuple(dict.fromkeys(inputs))
    implied: set[str] = {"prompt"} if len(inputs) > 1 else set()
    for name in inputs:
        implied |= IMPLIED.get(name, set())
        if name == "advantage":
            implied |= {rewards} | IMPLIED.get(rewards, set())
    return [name for name in inputs if name not in implied]


class PoolPump:
    """Pump of one actor of a pool.

    Args:
        role: handles the rows, after `setup`.
        context: its context.
        mailbox: the role's thread.
        watch: the actor's watchdog.
        fail: ends the process as crashed, with the exception as the reason.
    """

    def __init__(
        self,
        role: Role,
        context: Context,
        mailbox: pykka.ActorRef[Mailbox],
        watch: Watchdog,
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
        self._accepts_more = False
        self._ending: asyncio.Task[None] | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self._inputs = role.inputs()
        self._triggers = trigger_columns(self._inputs, context.config.advantages.reads)
        self._ack_wait = context.config.supervision.ack_wait
        self._idle_reason = f"a row with {' and '.join(self._inputs)}"

    async def run(self, stopping: asyncio.Event) -> None:
        """Pump until `stopping` is set; then finish the current rows and return the prefetched ones."""
        connection, subjects = self.table.connection, self.table.subjects
        filters = [subjects.column(name, kind) for name in self._triggers for kind in self.role.kinds]
        # A redelivered cell may belong to a row below the floor, whose other cells are purged.
        await connection.nc.subscribe(subjects.numbered("checkpoint", "*"), cb=self._on_checkpoint)
        limit = max(1, self.role.row_limit())
        # An actor that shares a device takes no further rows in, so that it releases the device after its batch.
        shares_device = self.context.device_lock is not nullcontext
        while not stopping.is_set():
            spec = pool_spec(self.context.role, filters, self._ack_wait, max_ack_pending=max(1024, 8 * limit))
            await ensure_consumer(connection, subjects.table_stream, spec)
            prefetch = self.role.prefetch
            credit = max(4, 2 * limit) if prefetch else limit
            pull = PullSubscription(
                connection,
                subjects.table_stream,
                self.context.role,
                credit,
                self.watch.record_delivery,
                prefetch=prefetch,
            )
            await pull.start()
            self._pull = pull
            renewing = asyncio.create_task(self._renew(pull))
            try:
                self.watch.start_waiting(self._idle_reason)
                while not stopping.is_set() and not pull.consumer_lost:
                    messages = await pull.fetch(limit, PATIENCE, self.role.batch_wait)
                    redelivered = self._fetched = [message for message in messages if is_redelivery(message)]
                    new = [message for message in messages if not is_redelivery(message)]
                    await self._process(new, accept_more=not (redelivered or shares_device))
                    # A redelivered row may have killed an actor; alone, it cannot blame its neighbours.
                    for message in redelivered:
                        await self._process([message])
                    self._fetched = []
            finally:
                renewing.cancel()
                await self._return_prefetched(pull)

    def wake(self) -> None:
        """Make `run` check `stopping` now, and return prefetched rows even while the current ones are being handled."""
        if self._pull is not None:
            self._pull.wake()
            self._ending = asyncio.create_task(self._return_prefetched(self._pull))

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
                await self._ignore_errors(message.in_progress())

    @staticmethod
    async def _ignore_errors(work: Awaitable[Any]) -> None:
        # A lost acknowledgement only causes a redelivery.
        try:
            await work
        except nats.errors.Error:
            return

    async def _process(self, messages: list[Msg], *, accept_more: bool = False) -> None:
        """Handle messages; with `accept_more`, also rows that arrive meanwhile while the role has room."""
        if not messages:
            return
        self._accepts_more = accept_more
        try:
            if jobs := await self._join_all(messages):
                try:
                    last = await ask(
                        self.mailbox, lambda: self._handler.run(jobs, self._take_more, self._report_finished)
                    )
                    self._schedule_finish(last)
                finally:
                    # Jobs reported before the answer have been scheduled before it.
                    await asyncio.gather(*self._finishing)
                self.watch.start_waiting(self._idle_reason)
        except ExitRequestedError as error:
            self.fail(error)
        except (RelaxError, OSError) as error:
            self.fail(error)
        finally:
            self._jobs, self._finishing, self._accepts_more = [], set(), False

    async def _join_all(self, messages: list[Msg]) -> list[Job]:
        self._fetched = self._fetched + messages
        jobs = [job for job in await asyncio.gather(*map(self._join, messages)) if job is not None]
        self._fetched = [message for message in self._fetched if message not in messages]
        if jobs:
            self._jobs += jobs
            self.watch.start_rows([str(job.row) for job in self._jobs])
        return jobs

    def _take_more(self, most: int) -> list[Job]:
        """Take up to `most` rows that arrived meanwhile, without waiting. Called in the role's thread."""
        pull = self._pull
        # Cheap test first: a generating role asks between any two tokens.
        if pull is None or most < 1 or not self._accepts_more or pull.is_requested(most):
            return []
        return self.table.connection.call(self._take_more_async(pull, most), CALL_DEADLINE)

    async def _take_more_async(self, pull: PullSubscription, most: int) -> list[Job]:
        # As in `run`: a redelivered row is handled alone, after all of these.
        return await self._join_all(await pull.fetch_nowait(most))

    async def _return_prefetched(self, pull: PullSubscription) -> None:
        await pull.close()
        for message in pull.drain():
            await self._ignore_errors(message.nak())

    def _report_finished(self, jobs: list[Job]) -> None:
        """Write the results of finished jobs while others are handled. Called in the role's thread."""
        self.table.connection.loop.call_soon_threadsafe(self._schedule_finish, jobs)

    def _schedule_finish(self, jobs: list[Job]) -> None:
        task = asyncio.create_task(self._finish_all(jobs))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish_all(self, jobs: list[Job]) -> None:
        try:
            await asyncio.gather(*map(self._finish, jobs))
        except Exception as error:  # noqa: BLE001 no caller awaits this task
            self.fail(error)
        for job in jobs:
            self._release(job)
        if self._jobs:
            self.watch.start_rows([str(job.row) for job in self._jobs])

    async def _join(self, message: Msg) -> Job | None:
        """Fetch the row's other columns; None if the row is done, gone, or a column is still missing."""
        try:
            cell = self.table.subjects.parse(message.subject)
        except SubjectError as error:
            self.context.journal.event("malformed_subject", subject=message.subject, error=str(error)[:500])
            await self._ignore_errors(message.term())
            return None
        row = cell.row
        again = is_redelivery(message)
        over = self._is_below_floor(row)
        if over and not again:
            self.context.journal.event("stray_cell", subject=message.subject, error="the rows of its step are gone")
        if over or (again and not await self._still_wanted(row, message.subject)):
            await self._ignore_errors(message.ack())
            return None
        cells = {cell.field: message.data}
        others = [name for name in self._inputs if name != cell.field]
        done = [self.role.writes] if len(self._triggers) > 1 and self.role.writes else []
        found = await asyncio.gather(
            *(self.table.get_async(self.table.subject(row, name)) for name in [*others, *done])
        )
        missing = [name for name, other in zip(others, found, strict=False) if other is None]
        if missing or (done and found[-1] is not None):
            if early := sorted(IMPLIED.get(cell.field, set()) & set(missing)):
                await self._quarantine_early(cell, early)
            await self._ignore_errors(message.ack())
            return None
        cells |= {name: other.data for name, other in zip(others, found, strict=False) if other is not None}
        return Job(message, row, cells)

    async def _quarantine_early(self, cell: CellId, missing: list[str]) -> None:
        """Quarantine a row whose column exists before the columns it is made of; nothing would trigger it again."""
        row = cell.row
        if row.kind == "group":
            last = await self.table.fetch_last_async("checkpoint", Checkpoint)
            self._floor = max(self._floor, last.floor if last is not None else 0)
            if row.step < self._floor:
                return
        error = f"column {cell.field} was written before {' and '.join(missing)}, which it is made of"
        await self._quarantine(row, 1, f"MalformedRow: {error}", "")

    async def _still_wanted(self, row: RowId, subject: str) -> bool:
        """Whether to handle a redelivered row; a row that failed too often is quarantined."""
        ends = [self.role.writes] if self.role.writes else []
        ends += ["dropped", "quarantined"]
        looked_up = [subject, *(self.table.subject(row, name) for name in ends)]
        itself, *ended = await asyncio.gather(*map(self.table.get_async, looked_up))
        # A row whose own cell is gone was purged with the floor or with an evaluated version.
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
            await self._handle_error(job, job.error)
            return
        if job.data is not None and not self._is_below_floor(job.row):
            written = await self.table.put_async(self.table.subject(job.row, job.field), job.data)
            if written and job.field == "dropped":
                dropped = self.table.read(job.data, Dropped)
                self.context.journal.event(
                    "row_dropped", row=str(job.row), reason=dropped.reason, detail=dropped.detail
                )
        self.handled += 1
        self._release(job)
        await self._ignore_errors(job.message.ack())

    def _release(self, job: Job) -> None:
        """Stop extending the job's deadline; an extension after the nak would override the nak's delay."""
        self._jobs = [other for other in self._jobs if other is not job]

    async def _handle_error(self, job: Job, error: Exception) -> None:
        if isinstance(error, BLAMELESS_ERRORS) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
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
            self._release(job)
            await self._ignore_errors(job.message.ack())
        else:
            self.context.journal.event("row_failed", row=str(job.row), failures=count, error=text, traceback=trace)
            self._release(job)
            await self._ignore_errors(job.message.nak(delay=RETRY_SECONDS * count))

    async def _quarantine(self, row: RowId, count: int, error: str, trace: str) -> None:
        subject = self.table.subject(row, "quarantined")
        cell = Quarantined(self.context.role, count, error[:2000], trace[-8000:])
        if await self.table.put_async(subject, self.table.encode(subject, cell)):
            self.context.journal.event("row_quarantined", row=str(row), deliveries=count, error=error, traceback=trace)
