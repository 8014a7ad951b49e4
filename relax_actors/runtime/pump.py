"""Pump of a pool actor: fetch, join, handle, write, acknowledge.

If the actor is killed at any point, the message is redelivered, and the write is repeated or refused. The message's
acknowledgement deadline is extended while its row is handled; the watchdog ends a process that makes no progress.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext

import pykka
from nats.aio.msg import Msg

from broker.pull import PullSubscription
from broker.streams import wait_for_consumer
from broker.table import CALL_DEADLINE
from relax_actors.errors import RelaxError
from relax_actors.runtime.context import Context
from relax_actors.runtime.finish import Finisher, ignore_errors
from relax_actors.runtime.handler import Handler, Job
from relax_actors.runtime.join import Join
from relax_actors.runtime.mailbox import ExitRequestedError, Mailbox, ask
from relax_actors.runtime.role import Role
from relax_actors.runtime.suspects import Suspects
from relax_actors.runtime.watchdog import Watchdog

PATIENCE = 5.0
SERVE_SECONDS = 1.0
"""Time after which an actor that shares its device takes no further request that belongs to no row."""


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
        self._pull: PullSubscription | None = None
        self._fetched: list[Msg] = []
        self._handler = Handler(role, context)
        self._suspects = Suspects(context, isolates=role.isolates_suspects)
        self._jobs: list[Job] = []
        self._accepts_more = False
        self._wanted = False
        # Such an actor takes no further rows in, so that it releases the device after its batch.
        self._shares_device = context.device_lock is not nullcontext
        context.wake = self._wake_from_thread
        self._ending: asyncio.Task[None] | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self._join = Join(role, context)
        self._finisher = Finisher(role, context, self._join.is_below_floor, self._release, fail)
        self._ack_wait = context.config.supervision.ack_wait
        self._idle_reason = f"a row with {' and '.join(self._join.inputs)}"

    @property
    def handled(self) -> int:
        """Rows with a written result so far."""
        return self._finisher.handled

    async def run(self, stopping: asyncio.Event) -> None:
        """Pump until `stopping` is set; then finish the current rows and return the prefetched ones."""
        connection, subjects = self.table.connection, self.table.subjects
        # A redelivered cell may belong to a row below the floor, whose other cells are purged.
        await connection.nc.subscribe(subjects.numbered("checkpoint", "*"), cb=self._join.on_checkpoint)
        limit = max(1, self.role.row_limit())
        while not stopping.is_set():
            await wait_for_consumer(connection, subjects.table_stream, self.context.role)
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
                    if self._wanted:
                        pull.nudge()
                    messages = await pull.fetch(limit, PATIENCE, self.role.batch_wait)
                    if not messages:
                        await self._serve(pull)
                        continue
                    self._fetched = messages
                    await self._suspects.examine(messages)
                    alone = self._fetched = [message for message in messages if message in self._suspects]
                    together = [message for message in messages if message not in alone]
                    await self._process(together, accept_more=not (alone or self._shares_device))
                    # A row that may have killed an actor cannot blame its neighbours if it has none.
                    for message in alone:
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

    def _wake_from_thread(self) -> None:
        self.table.connection.loop.call_soon_threadsafe(self._want)

    def _want(self) -> None:
        self._wanted = True
        if self._pull is not None:
            self._pull.nudge()

    async def _serve(self, pull: PullSubscription) -> None:
        """Let the role do work that belongs to no row, if it asked for it."""
        if not self._wanted:
            return
        self._wanted = False
        self.watch.start_other_work("answering requests")

        def serve() -> None:
            with self.context.device_lock():
                end = time.monotonic() + (SERVE_SECONDS if self._shares_device else float("inf"))
                self.role.serve(lambda: bool(pull.buffered) or self.context.stopping() or time.monotonic() > end)

        try:
            await ask(self.mailbox, serve)
        except Exception as error:  # noqa: BLE001 no row is to blame
            self.fail(error)
        self.watch.start_waiting(self._idle_reason)

    async def _renew(self, pull: PullSubscription) -> None:
        while True:
            await asyncio.sleep(self._ack_wait / 3)
            held = [job.message for job in self._jobs] + self._fetched + pull.buffered
            for message in {id(message): message for message in held}.values():
                await ignore_errors(message.in_progress())

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
        jobs = [job for job in await asyncio.gather(*map(self._join.join, messages)) if job is not None]
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
        await self._suspects.examine(pull.buffered)
        # As in `run`: a row that may have killed an actor is handled alone, after all of these.
        return await self._join_all(await pull.fetch_nowait(most, self._suspects.__contains__))

    async def _return_prefetched(self, pull: PullSubscription) -> None:
        await pull.close()
        for message in pull.drain():
            await ignore_errors(message.nak())

    def _report_finished(self, jobs: list[Job]) -> None:
        """Write the results of finished jobs while others are handled. Called in the role's thread."""
        self.table.connection.loop.call_soon_threadsafe(self._schedule_finish, jobs)

    def _schedule_finish(self, jobs: list[Job]) -> None:
        task = asyncio.create_task(self._finish_all(jobs))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish_all(self, jobs: list[Job]) -> None:
        try:
            await asyncio.gather(*map(self._finisher.finish, jobs))
        except Exception as error:  # noqa: BLE001 no caller awaits this task
            self.fail(error)
        for job in jobs:
            self._release(job)
        if self._jobs:
            self.watch.start_rows([str(job.row) for job in self._jobs])

    def _release(self, job: Job) -> None:
        """Stop extending the job's deadline; an extension after the nak would override the nak's delay."""
        self._jobs = [other for other in self._jobs if other is not job]
