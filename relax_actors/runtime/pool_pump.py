"""Pump of a pool actor: fetch, join, handle, write, acknowledge.

If the actor is killed at any point, the message is redelivered, and the write is repeated or refused. The message's
acknowledgement deadline is extended while its row is handled; the watchdog ends a process that makes no progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import nats.errors
import pykka
from nats.aio.msg import Msg

from broker.pull import Delivery, PullSubscription, delivery_of, is_redelivery
from broker.streams import wait_for_consumer
from broker.table import CALL_DEADLINE
from relax_actors.errors import RelaxError, SubjectError
from relax_actors.runtime.actor import ExitRequestedError
from relax_actors.runtime.context import Context
from relax_actors.runtime.finish import Finisher, ignore_errors
from relax_actors.runtime.handler import Job
from relax_actors.runtime.join import Join
from relax_actors.runtime.overflow import Overflow
from relax_actors.runtime.pump import Pump
from relax_actors.runtime.role import Role
from relax_actors.runtime.role_actor import HandleRows, RoleActor, Serve
from relax_actors.runtime.watchdog import Watchdog

PATIENCE = 5.0
FINISH_SECONDS = 0.5
"""Seconds for a result, or for the count of a returned row, to be stored before the row is returned."""


class PoolPump(Pump[list[Msg]]):
    """Pump of one actor of a pool."""

    def __init__(self, role: Role, actor: pykka.ActorRef[RoleActor], watch: Watchdog) -> None:
        self.role, self.context, self.actor, self.watch = role, role.context, actor, watch
        self.table = self.context.table
        self._pull: PullSubscription | None = None
        self._fetched: list[Msg] = []
        self._suspects = Suspects(self.context, isolates=role.isolates_suspects)
        self._jobs: list[Job] = []
        self._accepts_more = False
        self._wanted = False
        self._handles = self._serves = False
        self.context.wake, self.context.has_work = self._wake_from_thread, self._has_work
        self._renewing: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self._overflow = Overflow(self.context) if role.spec.may_be_spot else None
        self._join = Join(role, self.context)
        self._finisher = Finisher(role, self.context, self._join.is_below_floor, self._release)
        self._limit = 1
        self._idle_reason = f"a row with {' and '.join(self._join.inputs)}"

    @property
    def handled(self) -> int:
        """Rows with a written result so far."""
        return self._finisher.handled

    async def open(self) -> None:
        """Follow the floor, and extend the deadlines of messages from now on."""
        connection, subjects = self.table.connection, self.table.subjects
        # A redelivered cell may belong to a row below the floor, whose other cells are purged.
        await connection.nc.subscribe(subjects.numbered("checkpoint", "*"), cb=self._join.on_checkpoint)
        self._limit = max(1, self.role.row_limit())
        if self._overflow is not None:
            await self._overflow.start()
        self._renewing = asyncio.create_task(self._renew())

    async def fetch(self) -> list[Msg] | None:
        """Fetch messages of rows."""
        pull = self._pull
        if pull is None or pull.consumer_lost:
            pull = await self._subscribe()
        if self._wanted:
            pull.nudge()
        return await pull.fetch(self._limit, PATIENCE, self.role.batch_wait) or None

    async def handle(self, work: list[Msg]) -> None:
        """Handle rows together, but each row alone that may have killed an actor."""
        self._fetched = work
        await self._suspects.examine(work)
        alone = self._fetched = [message for message in work if message in self._suspects]
        together = [message for message in work if message not in alone]
        await self._process(together, accept_more=not alone)
        # A row that may have killed an actor cannot blame its neighbours if it has none.
        for message in alone:
            await self._process([message])
        self._fetched = []

    async def idle(self) -> None:
        """Let the role do work that belongs to no row, if it asked for it."""
        if not self._wanted:
            return
        self._wanted, self._serves = False, True
        self.watch.start_other_work("answering requests")
        try:
            await self.actor.ask(Serve(self), block=False)
        except Exception as error:  # noqa: BLE001 no row is to blame
            self.context.fail(error)
        finally:
            self._serves = False
        self.watch.start_waiting(self._idle_reason)

    async def close(self) -> None:
        """Return the prefetched rows."""
        if self._renewing is not None:
            self._renewing.cancel()
        if self._overflow is not None:
            self._overflow.stop()
        await self._return_prefetched()

    async def give_back(self) -> list[str]:
        """Return all rows in hand, which another actor of the pool then gets at once."""
        if self._pull is not None:
            self._pull.wake()
        await self._return_prefetched()
        if self._finishing:  # results that are being written
            await asyncio.wait(self._finishing, timeout=FINISH_SECONDS)
        held, self._jobs, self._fetched = [job.message for job in self._jobs] + self._fetched, [], []
        messages = list({id(message): message for message in held}.values())
        await asyncio.gather(*map(self._give_back_row, messages))
        # If the process is killed now, the node must not return them again: others may have them.
        self.watch.forget_deliveries()
        prefix = f"{self.table.subjects.prefix}."
        return [message.subject.removeprefix(prefix).rpartition(".")[0] for message in messages]

    async def _give_back_row(self, message: Msg) -> None:
        """Return a row, counted as returned so that nobody suspects it of having killed this actor."""
        with suppress(SubjectError, RelaxError, nats.errors.Error, TimeoutError):
            row = self.table.subjects.parse(message.subject).row
            await asyncio.wait_for(self.context.state.count_return(self.context.role, row), FINISH_SECONDS)
        await ignore_errors(message.nak())

    def wake(self) -> None:
        """Make `fetch` return, and return prefetched rows even while others are handled."""
        if self._pull is not None:
            self._pull.wake()
            self._ending = asyncio.create_task(self._return_prefetched())

    async def _subscribe(self) -> PullSubscription:
        """Subscribe to the role's consumer, as soon as it exists."""
        await self._return_prefetched()
        connection, stream, prefetch = self.table.connection, self.table.subjects.table_stream, self.role.prefetch
        await wait_for_consumer(connection, stream, self.context.role)
        credit = max(4, 2 * self._limit) if prefetch else self._limit
        overflow = self._overflow
        pull = PullSubscription(
            connection,
            stream,
            self.context.role,
            credit,
            self.watch.record_delivery,
            prefetch=prefetch,
            asks=self.context.shares_device,
            backlog=None if overflow is None else lambda: overflow.backlog,
        )
        await pull.start()
        self._pull = pull
        self.watch.start_waiting(self._idle_reason)
        if self.context.stopping():
            pull.wake()
        return pull

    async def _return_prefetched(self) -> None:
        if (pull := self._pull) is not None:
            await pull.close()
            await asyncio.gather(*map(self._give_back_row, pull.drain()))

    async def _renew(self) -> None:
        """Extend the deadline of every message in hand."""
        while True:
            await asyncio.sleep(self.context.config.supervision.ack_wait / 3)
            prefetched = [] if self._pull is None else self._pull.buffered
            held = [job.message for job in self._jobs] + self._fetched + prefetched
            for message in {id(message): message for message in held}.values():
                await ignore_errors(message.in_progress())

    def _wake_from_thread(self) -> None:
        self.table.connection.loop.call_soon_threadsafe(self._want)

    def _want(self) -> None:
        self._wanted = True
        if self._pull is not None:
            self._pull.nudge()

    async def _process(self, messages: list[Msg], *, accept_more: bool = False) -> None:
        """Handle messages; with `accept_more` also rows that arrive while the role has room."""
        if not messages:
            return
        self._accepts_more = accept_more
        try:
            self._handles = True
            if jobs := await self._join_all(messages):
                try:
                    self._schedule_finish(await self.actor.ask(HandleRows(jobs, self), block=False))
                finally:
                    self._handles = False
                    # Jobs reported before the answer have been scheduled before it.
                    await asyncio.gather(*self._finishing)
                self.watch.start_waiting(self._idle_reason)
        except (ExitRequestedError, RelaxError, OSError) as error:
            self.context.fail(error)
        finally:
            self._jobs, self._finishing, self._accepts_more, self._handles = [], set(), False, False

    async def _join_all(self, messages: list[Msg]) -> list[Job]:
        self._fetched = self._fetched + messages
        jobs = [job for job in await asyncio.gather(*map(self._join.join, messages)) if job is not None]
        self._fetched = [message for message in self._fetched if message not in messages]
        if jobs:
            self._jobs += jobs
            self.watch.start_rows([str(job.row) for job in self._jobs])
        return jobs

    @property
    def has_rows(self) -> bool:
        """Whether prefetched rows wait. Called in the role's thread."""
        return self._pull is not None and bool(self._pull.buffered)

    def _has_work(self) -> bool:
        """Return whether the actor has rows, or its consumer may have some for it."""
        if self._handles or self._fetched or self.has_rows:
            return True
        pull, is_connected = self._pull, self.table.connection.nc.is_connected
        if pull is None or pull.consumer_lost or not is_connected or self._serves or self.context.stopping():
            return False
        return not pull.is_drained

    def take_more(self, most: int) -> list[Job]:
        """Take up to `most` rows that have arrived; called in the role's thread."""
        pull = self._pull
        # Cheap test first: a generating role asks between any two tokens.
        if pull is None or most < 1 or not self._accepts_more or pull.is_requested(most):
            return []
        # The batch drains, so that the actor releases its device.
        if self.context.yields_device():
            return []
        return self.table.connection.call(self._take_more_async(pull, most), CALL_DEADLINE)

    async def _take_more_async(self, pull: PullSubscription, most: int) -> list[Job]:
        await self._suspects.examine(pull.buffered)
        # As in `handle`: a row that may have killed an actor is handled alone, after all of these.
        return await self._join_all(await pull.fetch_nowait(most, self._suspects.__contains__))

    def report_finished(self, jobs: list[Job]) -> None:
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
            self.context.fail(error)
        for job in jobs:
            self._release(job)
        if self._jobs:
            self.watch.start_rows([str(job.row) for job in self._jobs])

    def _release(self, job: Job) -> None:
        """Stop extending the job's deadline, which would override the delay of a nak."""
        self._jobs = [other for other in self._jobs if other is not job]


class Suspects:
    """Tells rows whose actors were killed from outside from possible causes of a death."""

    def __init__(self, context: Context, *, isolates: bool) -> None:
        self._context, self._isolates = context, isolates
        self._known: dict[Delivery, bool] = {}

    async def examine(self, messages: Sequence[Msg]) -> None:
        """Look up why messages were delivered again; forgets those of earlier calls."""
        causes: dict[Delivery, bool] = {}
        for message in filter(is_redelivery, messages):
            if (delivery := delivery_of(message)) is not None:
                known = self._known.get(delivery)
                causes[delivery] = await self._may_be_cause(message, delivery) if known is None else known
        self._known = causes

    def __contains__(self, message: Msg) -> bool:
        """Whether a message is handled alone; so is a redelivery that was not examined."""
        delivery = delivery_of(message)
        return self._isolates and is_redelivery(message) and (delivery is None or self._known.get(delivery, True))

    async def _may_be_cause(self, message: Msg, delivery: Delivery) -> bool:
        try:
            row = self._context.table.subjects.parse(message.subject).row
        except SubjectError:
            return True
        failed = await self._context.state.failures(self._context.role, row)
        # A row may use up the machine's memory without a trace. Its neighbours must not reach the limit with it.
        most = self._context.config.supervision.max_kills // 2
        blameless = failed.external_kills + failed.returns
        return failed.count > 0 or failed.external_kills > most or delivery.deliveries - 1 > blameless
