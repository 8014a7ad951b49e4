"""What a rollout uses to talk to the actors that host environments.

Operations are submitted from the role's thread and grouped into one request an actor. Answers arrive in the event loop
and are taken by the role's thread when it has time. A session lives on the actor that rendezvous hashing names among
those with a lease; it stays there until that actor is lost.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from broker.codec import decode, encode
from relax_actors.config import Config
from relax_actors.envs.members import Members
from relax_actors.envs.operations import Close, Operation, Pending, problem_of, size_of
from relax_actors.errors import CodecError, RelaxError
from relax_actors.messages import Act, EnvironmentAnswer, EnvironmentAnswers, EnvironmentRequest, Fault, Open

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from broker.leases import RunState
    from broker.table import Table

TICK_SECONDS = 0.25
SILENT_SECONDS, TRIES = 3.0, 3
"""Time without a message about a request after which it is sent again, and how often it is sent."""
SLACK_SECONDS = 10.0
"""Time beyond the deadline of an operation for the actor to report that it has passed."""
BUSY_SECONDS = 0.2
MAX_REQUEST_BYTES = 1 << 20
CALL_SECONDS = 30.0
log = structlog.get_logger()


class Surroundings(Protocol):
    """What the client needs of `relax_actors.runtime.Context`."""

    config: Config
    table: Table
    state: RunState

    @property
    def author(self) -> str:
        """Signature of the incarnation that holds the sessions."""
        ...


class EnvironmentClient:
    """Sessions of one rollout actor.

    `submit`, `take` and `close` are called in the role's thread. Every submitted `Open` and `Act` gets exactly one
    answer, at the latest when its deadline has passed: `Fault.LOST` if the actor that had the session is gone, after
    which the caller opens the session again with the actions so far.

    Args:
        context: context of the rollout's actor, whose run has the section [environment].
    """

    def __init__(self, context: Surroundings) -> None:
        section = context.config.environment
        assert section is not None  # noqa: S101 the role is chosen by this section
        self._context, self._section = context, section
        self._connection, self._subjects = context.table.connection, context.table.subjects
        self._answers: queue.Queue[EnvironmentAnswer] = queue.Queue()
        # Answers that a coroutine waits for; the others are taken by the role's thread.
        self._asked: dict[str, asyncio.Future[EnvironmentAnswer]] = {}
        self._pending: dict[str, Pending] = {}
        self._unsent: list[Pending] = []
        self._closing: dict[int, list[str]] = {}
        self._homes: dict[str, int] = {}
        self._members = Members(context.state)
        self._sending: set[asyncio.Task[None]] = set()
        self._requests: dict[int, list[Pending]] = {}
        self._next_request = 0
        self._flushing = False
        self._connection.call(self._start(), CALL_SECONDS)

    def submit(self, operations: Sequence[Operation]) -> None:
        """Begin operations without waiting; a session has one open operation at most."""
        if operations:
            self._connection.loop.call_soon_threadsafe(self._add, list(operations))

    async def ask(self, operation: Open | Act) -> EnvironmentAnswer:
        """Perform an operation, and return its answer. Called in the event loop's thread."""
        answer: asyncio.Future[EnvironmentAnswer] = self._connection.loop.create_future()
        self._asked[operation.session] = answer
        self._add([operation])
        return await answer

    def leave(self, session: str) -> None:
        """Close a session. Called in the event loop's thread."""
        self._add([Close(session)])

    def take(self, timeout: float) -> list[EnvironmentAnswer]:
        """Return the answers that have arrived; waits at most `timeout` seconds for the first one."""
        answers: list[EnvironmentAnswer] = []
        try:
            answers.append(self._answers.get(timeout=timeout) if timeout > 0 else self._answers.get_nowait())
            while True:
                answers.append(self._answers.get_nowait())
        except queue.Empty:
            return answers

    def close(self) -> None:
        """Close all sessions."""
        self._connection.call(self._stop(), CALL_SECONDS)

    async def _start(self) -> None:
        inbox = self._connection.nc.new_inbox()
        self._inbox = inbox
        self._subscription = await self._connection.nc.subscribe_direct(f"{inbox}.*", self._receive)
        await self._look()
        self._watching = asyncio.ensure_future(self._watch())

    async def _stop(self) -> None:
        self._watching.cancel()
        for name in list(self._homes):
            self._leave(name)
        self._flush()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._subscription.unsubscribe()

    def _add(self, operations: list[Operation]) -> None:
        now = time.monotonic()
        for operation in operations:
            if isinstance(operation, Close):
                pending = self._pending.pop(operation.session, None)
                future = self._asked.pop(operation.session, None)
                if pending is not None and future is not None and not future.done():
                    future.set_result(pending.lost("its session was closed"))
                self._leave(operation.session)
                continue
            limit = self._section.open_seconds if isinstance(operation, Open) else self._section.step_seconds
            pending = Pending(operation, now + limit + SLACK_SECONDS)
            self._pending[operation.session] = pending
            if problem := problem_of(operation):
                self._settle(pending, pending.failed(problem))
            else:
                self._unsent.append(pending)
        self._flush_soon()

    def _leave(self, session: str) -> None:
        home = self._homes.pop(session, None)
        if home is not None:
            self._closing.setdefault(home, []).append(session)
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._connection.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what waits, grouped by actor; without a known actor it waits for the next look."""
        self._flushing = False
        waiting, self._unsent = self._unsent, []
        groups: dict[int, list[Pending]] = {member: [] for member in self._closing}
        for pending in waiting:
            if self._pending.get(pending.operation.session) is not pending:
                continue
            member = self._member_of(pending)
            if member is not None:
                groups.setdefault(member, []).append(pending)
            elif isinstance(pending.operation, Act):
                self._lose(pending, "no actor has its session")
            else:
                self._unsent.append(pending)
        for member, group in groups.items():
            self._send(member, group)

    def _member_of(self, pending: Pending) -> int | None:
        """Return the actor for an operation: the session's home, or by rendezvous hashing."""
        session = pending.operation.session
        if isinstance(pending.operation, Act):
            return self._homes.get(session)
        return self._members.choose(session, pending.busy)

    def _send(self, member: int, group: list[Pending]) -> None:
        closes = self._closing.pop(member, [])
        parts: list[list[Pending]] = [[]]
        size = 0
        for pending in group:
            own = size_of(pending.operation)
            if size + own > MAX_REQUEST_BYTES and parts[-1]:
                parts.append([])
                size = 0
            parts[-1].append(pending)
            size += own
        for part in parts:
            self._publish(member, part, closes)
            closes = []

    def _publish(self, member: int, part: list[Pending], closes: list[str]) -> None:
        now = time.monotonic()
        operations = [pending.operation for pending in part]
        opens = [operation for operation in operations if isinstance(operation, Open)]
        acts = [operation for operation in operations if isinstance(operation, Act)]
        try:
            data = encode(EnvironmentRequest(opens, acts, closes), self._context.author)
        except CodecError as error:
            self._refuse(part, member, closes, error)
            return
        for pending in part:
            pending.member, pending.sent, pending.heard = member, now, now
            pending.tries += 1
            self._homes[pending.operation.session] = member
        self._next_request += 1
        self._requests[self._next_request] = part
        reply = f"{self._inbox}.{self._next_request}"
        task = asyncio.ensure_future(self._publish_async(self._subjects.service("env", member), data, reply))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _refuse(self, part: list[Pending], member: int, closes: list[str], error: CodecError) -> None:
        """Answer an operation that cannot be encoded; the others of its request are sent alone."""
        if len(part) == 1:
            self._settle(part[0], part[0].failed(f"its request: {error}"))
            part = []
        for pending in part:
            self._publish(member, [pending], [])
        if closes:
            self._publish(member, [], closes)

    async def _publish_async(self, subject: str, data: bytes, reply: str) -> None:
        try:
            await self._connection.nc.publish(subject, data, reply=reply)
        except Exception as error:  # noqa: BLE001 the request is sent again
            log.debug("environment_request_failed", error=str(error))

    def _receive(self, message: Msg) -> None:
        number = message.subject.rpartition(".")[2]
        part = self._requests.get(int(number)) if number.isdigit() else None
        if part is None:
            return
        try:
            received = decode(message.data, EnvironmentAnswers)
        except CodecError as error:
            log.warning("malformed_answer", error=str(error)[:500])
            return
        now = time.monotonic()
        waiting = {pending.operation.session: pending for pending in part}
        for pending in part:
            pending.heard = now
        for answer in received.answers:
            pending_ = waiting.get(answer.session)
            if pending_ is not None and (answer.turn == pending_.turn or answer.error == Fault.REPLAY):
                self._take_answer(pending_, answer)
        if not received.remaining:
            del self._requests[int(number)]

    def _take_answer(self, pending: Pending, answer: EnvironmentAnswer) -> None:
        if self._pending.get(answer.session) is not pending:
            return
        if answer.error == Fault.BUSY and time.monotonic() < pending.deadline:
            self._homes.pop(answer.session, None)
            pending.busy.add(-1 if pending.member is None else pending.member)
            pending.member, pending.tries = None, 0
            self._connection.loop.call_later(BUSY_SECONDS, self._try_again, pending)
            return
        if answer.error:
            self._leave(answer.session)
        self._settle(pending, answer)

    def _try_again(self, pending: Pending) -> None:
        if pending.busy.issuperset(self._members):
            pending.busy.clear()
        self._unsent.append(pending)
        self._flush_soon()

    def _settle(self, pending: Pending, answer: EnvironmentAnswer) -> None:
        session = pending.operation.session
        if self._pending.get(session) is pending:
            del self._pending[session]
            if (future := self._asked.pop(session, None)) is None:
                self._answers.put(answer)
            elif not future.done():
                future.set_result(answer)

    def _lose(self, pending: Pending, detail: str) -> None:
        self._leave(pending.operation.session)
        self._settle(pending, pending.lost(detail))

    async def _watch(self) -> None:
        """Look after operations that get no answer, as long as the client lives."""
        while True:
            try:
                if self._pending and self._members.is_stale:
                    await self._look()
                self._check(time.monotonic())
            except RelaxError as error:
                log.warning("environments_not_found", error=str(error))
            await asyncio.sleep(TICK_SECONDS)

    async def _look(self) -> None:
        """Read which actors have a lease."""
        for member, incarnation in await self._members.look():
            self._lose_all(member, incarnation)
        if self._unsent:
            self._flush_soon()

    def _lose_all(self, member: int, incarnation: int) -> None:
        """Lose the turns of an ended incarnation's sessions; openings go to the new one."""
        for pending in list(self._pending.values()):
            if pending.member == member and isinstance(pending.operation, Act):
                self._lose(pending, f"environment.{member}#{incarnation} has ended")
            elif pending.member == member:
                self._send(member, [pending])

    def _check(self, now: float) -> None:
        for pending in list(self._pending.values()):
            if now > pending.deadline:
                self._lose(pending, "no answer before its deadline")
            elif pending.member is not None and pending.member not in self._members:
                self._lose(pending, f"environment.{pending.member} is gone")
            elif pending.member is not None and now - pending.heard > SILENT_SECONDS and pending not in self._unsent:
                if pending.tries < TRIES:
                    self._send(pending.member, [pending])
                else:
                    self._lose(pending, f"environment.{pending.member} does not answer")
        if len(self._requests) > len(self._pending):
            self._requests = {
                number: part
                for number, part in self._requests.items()
                if any(self._pending.get(pending.operation.session) is pending for pending in part)
            }
