"""Agents' sessions in a rollout actor: requests extend sequences, answers are logged first.

All methods run in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from broker.subjects import RowId
from relax_actors.errors import ConfigError, RelaxError, RowError, RowTakenError
from relax_actors.messages import FinishReason, SessionLog, SessionStep, SessionTurn
from relax_actors.messages.generate import GenerateAnswer, GenerateCall, Refusal, SessionAnswer, SessionCall
from relax_actors.messages.session_log import ROOT
from relax_actors.runtime.context import Context
from relax_actors.sessions.agent_environment import AgentEnvironments
from relax_actors.sessions.agent_turns import AgentTurns, asked_key, prompt_of
from relax_actors.sessions.call_watch import CallWatch
from relax_actors.sessions.deliveries import Deliveries, Delivery
from relax_actors.sessions.dialogue import Dialogue
from relax_actors.sessions.message_media import MessageMedia
from relax_actors.sessions.service import LEFT, GenerationService, Refused, refused_call
from relax_actors.sessions.session_book import Rules, Session, SessionBook
from relax_actors.sessions.session_checks import check_branches, check_current, check_player, check_rewards, over
from relax_actors.sessions.session_log import HeldLogs, LogWriter, released, restore

if TYPE_CHECKING:  # `relax check` loads every role, and needs no NATS
    from relax_actors.envs.client import EnvironmentClient

TICK_SECONDS = 0.5


class AgentSessions:
    """Implements `service.Sessions`.

    `room` is the largest number of tokens of a sequence. `on_end` is called when all samples of a row have ended, or
    another actor has taken it over. `media` is None for a model that reads text only, `hosts` in a run without
    environment.
    """

    def __init__(
        self,
        context: Context,
        dialogue: Dialogue,
        service: GenerationService,
        room: int,
        on_end: Callable[[RowId], None],
        media: MessageMedia | None = None,
        hosts: EnvironmentClient | None = None,
    ) -> None:
        section = context.config.agent
        if section is None:
            msg = "AgentSessions needs [agent]"
            raise ValueError(msg)
        self._context, self._section = context, section
        self.dialogue, self._media = dialogue, media
        self._environments: AgentEnvironments | None = None
        if hosts is not None and context.config.environment is not None:
            turns = context.config.environment.max_turns
            self._environments = AgentEnvironments(
                hosts, context.author, turns, self._write_step, self._report_environment
            )
        self._on_end = on_end
        grace = section.lease_seconds if context.config.local_agent is not None else section.idle_seconds
        self._agent_turns = AgentTurns(context.config, dialogue, service, room, media)
        refills = section.on_error == "refill"
        self._rules = Rules(section.seconds, grace, section.retries, section.max_turns, refills)
        self.book = SessionBook(self._rules)
        self._logs = HeldLogs(context.table, on_end)
        self._ticking: asyncio.Task[None] | None = None
        self._deliveries = Deliveries()
        # The last reported reason why a state of a row could not be recorded.
        self._unrecorded: dict[RowId, str] = {}
        self.turns = self.replays = self.branches = 0

    async def open(self, row: RowId, sessions: Sequence[Session]) -> None:
        """Offer the samples of a row to agents, from where an earlier actor left them."""
        logs = await self._logs.take(row)
        self._deliveries.forget(row)
        restore(sessions, logs)
        self.book.open(row, sessions, time.monotonic(), resumed=bool(logs))
        if self._media is not None:
            self._media.hold(row)
        if self._ticking is None:
            self._ticking = asyncio.ensure_future(self._tick())
        self._check(row)

    async def close(self, row: RowId) -> list[Session] | RowTakenError:
        """Forget a row; return its samples, or why another actor has them."""
        sessions = self.book.close(row)
        if self._environments is not None:
            for session in sessions:
                self._environments.close(session)
        self._deliveries.forget(row)
        self._unrecorded.pop(row, None)
        if self._media is not None:
            self._media.forget(row)
        return self._logs.release(row) or sessions

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.book.expire(time.monotonic())
            if self._environments is not None:
                self._environments.sweep(self.book.holds)
            held = [session for session in self.book.unrecorded() if session.row in self._logs]
            await asyncio.gather(*map(self._try_record, held))

    async def _try_record(self, session: Session) -> None:
        """Record the states of a session; a failure is reported, and the next tick tries again."""
        try:
            await self._record(session)
        except Exception as error:  # noqa: BLE001 of one row; the others go on
            text = f"{type(error).__name__}: {error}"[:500]
            if self._unrecorded.get(session.row) != text:
                self._context.journal.event("session_not_recorded", session=session.id, error=text)
            self._unrecorded[session.row] = text

    async def _record(self, session: Session) -> None:
        """Record states of a session that the log lacks, or check that this actor holds its row.

        Raises:
            RowTakenError: this actor does not hold it.
            BrokerError: the states cannot be written; they stay unrecorded.
        """
        async with session.recording, self._log_of(session) as log:
            if states := list(session.unrecorded):
                await log.write(SessionLog(states=states))
                del session.unrecorded[: len(states)]
            else:
                await log.check()
        self._check(session.row)

    def _log_of(self, session: Session) -> AbstractAsyncContextManager[LogWriter]:
        """Return the log of a session; raises RowTakenError if another actor has its row."""
        if not self.book.holds(session):
            raise released(session.row)
        return self._logs.holding(session.row)

    def _check(self, row: RowId) -> None:
        if row in self._logs and self.book.is_over(row):
            self._on_end(row)

    async def handle(self, call: SessionCall) -> SessionAnswer:
        """Take, keep, show or end a session."""
        try:
            return await (self._take(call) if call.kind == "take" else self._handle(call))
        except Refused as error:
            return SessionAnswer(refusal=error.answer.refusal, detail=error.answer.detail)
        except RowTakenError as error:
            return SessionAnswer(refusal=Refusal.ELSEWHERE, detail=str(error))
        except RelaxError as error:
            return SessionAnswer(refusal=Refusal.FAILED, detail=self._failed(call.session, error))

    async def _take(self, call: SessionCall) -> SessionAnswer:
        while (taken := self.book.take(max(1.0, call.lease), time.monotonic())) is not None:
            name = taken.id
            with suppress(RowTakenError, Refused):
                await self._record(taken)
                now = time.monotonic()
                # Refused if the lease has ended meanwhile: the sample is then another agent's.
                if (session := self._find(name, now)).state is None:
                    return session.shown(name, now)
        return SessionAnswer()

    async def _handle(self, call: SessionCall) -> SessionAnswer:
        session = self._find(call.session, time.monotonic())
        await self._record(session)
        now = time.monotonic()
        session = self._find(call.session, now)  # its lease may have ended meanwhile
        if call.kind == "environment":
            return await self._step(session, call)
        if call.kind == "end" and session.state is None:
            if call.error:
                self.book.fail(session, now)
                self._context.journal.event("agent_failed", session=call.session, error=call.error[:1000])
            else:
                check_rewards(call, self._section.players)
                session.end(FinishReason.STOP, call)
                has_reward = session.has_reward(self._section.players)
                if not has_reward and self._context.config.takes_reported_reward(session.row):
                    self._context.journal.event("agent_without_reward", session=call.session)
        if session.unrecorded:
            await self._record(session)
        return session.shown(call.session, now)

    async def _write_step(self, session: Session, step: SessionStep) -> None:
        async with self._log_of(session) as log:
            await log.write(SessionLog(steps=[step]))

    def _report_environment(self, session: Session, why: str) -> None:
        self._context.journal.event("environment_failed", row=str(session.row), sample=session.sample, error=why)

    async def _step(self, session: Session, call: SessionCall) -> SessionAnswer:
        """Reset or step the environment of a session."""
        if self._environments is None:
            raise Refused(Refusal.INVALID, "the run has no section [environment]; add it, or step one of your own")

        def check() -> None:
            if not self.book.holds(session):
                raise released(session.row)
            check_current(session, call)

        seen = await self._environments.step(session, call, check)
        now = time.monotonic()
        session.alive_until = now + session.lease
        return replace(session.shown(call.session, now), seen=seen)

    def _find(self, name: str, now: float) -> Session:
        """Return a session and renew its lease; raises Refused if it is over or elsewhere."""
        session = self.book.find(name, now)
        if isinstance(session, Session):
            return session
        if session == "elsewhere":
            detail = f"no actor holds the row of session {name[:128]!r} now; its actor restarts"
            raise Refused(Refusal.ELSEWHERE, detail)
        raise Refused(Refusal.ENDED, over(name, "another agent has its sample, or it never existed"))

    def on_arrival(self, call: str) -> None:
        """Take notice that the agent has the answer to a call; see `service.Sessions`."""
        self._deliveries.on_arrival(call)

    def on_departure(self, call: str) -> None:
        """Take notice that the agent has left without the answer to a call; see `service.Sessions`."""
        self._deliveries.on_departure(call)

    async def generate(self, call: GenerateCall, watch: CallWatch, author: str = "") -> GenerateAnswer:
        """Answer a request of a session; a repeated one gets the recorded answer.

        Of a request whose client leaves before its answer is complete, nothing is recorded.
        """
        try:
            session = self._find(call.session, time.monotonic())
            check_current(session, call)
            check_player(call, self._section.players)
            check_branches(call, self._section.branches)
            return await (self._count(session, call) if call.counts else self._next(session, call, watch, author))
        except Refused as error:
            return error.answer
        except RowTakenError as error:
            return GenerateAnswer(refusal=Refusal.ELSEWHERE, detail=str(error))
        except (ConfigError, RowError) as error:  # of the template or the tokenizer
            return refused_call(error)
        except RelaxError as error:
            return GenerateAnswer(refusal=Refusal.FAILED, detail=self._failed(call.session, error), call=call.call)

    async def _count(self, session: Session, call: GenerateCall) -> GenerateAnswer:
        call, shown = await self._agent_turns.shown(session, call)
        plan = await self._agent_turns.plan(session, call, shown)
        return GenerateAnswer(prompt=prompt_of(session.forest, plan), call=call.call)

    async def _next(self, session: Session, call: GenerateCall, watch: CallWatch, author: str) -> GenerateAnswer:
        # One request of a sample at a time: a second one, such as a retry, may find the answer of the first.
        async with session.answering:
            check_current(session, call)
            if watch.is_cancelled:
                raise Refused(Refusal.FAILED, LEFT, call.call)
            with self._deliveries.expected(call.call, session) as delivery:
                return await self._answer(delivery, call, watch, author)

    def _failed(self, session: str, error: RelaxError) -> str:
        """Report an error that the request did not cause; return its text."""
        detail = f"{type(error).__name__}: {error}"[:500]
        self._context.journal.event("request_failed", session=session[:128], error=detail)
        return detail

    async def _answer(self, delivery: Delivery, call: GenerateCall, watch: CallWatch, author: str) -> GenerateAnswer:
        session = delivery.session
        call, shown = await self._agent_turns.shown(session, call)
        if session.unrecorded:  # its turns must follow the record of its attempt
            await self._record(session)
            check_current(session, call)
        replayed = session.forest.replayed(
            asked_key(call), call.call, n=call.n, is_retry=call.is_retry, deliverer=author
        )
        if replayed:
            self.replays += 1
            self._deliveries.give(delivery, replayed)
            return self._agent_turns.answer(session.forest, replayed)
        await self._check_turns_left(session, call)
        plan = await self._agent_turns.plan(session, call, shown)
        requests = self._agent_turns.requests(session, call, plan)
        try:
            said = await self._agent_turns.generate(requests, call, watch)
        except Refused:
            _renew(session, call)
            raise
        _renew(session, call)
        turns = self._agent_turns.turns(call, plan, requests[0].tokens, said)
        first, beginning = len(session.forest.turns), session.forest.beginnings
        async with self._log_of(session) as log:
            # In one cell, so that a repeated call finds all of its answers or none.
            cell = SessionLog([SessionTurn(session.sample, number, turn) for number, turn in enumerate(turns, first)])
            await log.write(cell)
        # A session that ended meanwhile, or was given to another agent: the record of that follows this cell.
        is_current = session.id == call.session and session.state is None
        is_known = session.forest.beginnings == beginning
        numbers = [session.forest.add(turn, is_used=is_current, is_known=is_known, deliverer=author) for turn in turns]
        check_current(session, call)
        self._deliveries.give(delivery, numbers)
        self.turns += call.n
        self.branches += call.n - 1 + (plan.parent == ROOT and first > 0)
        return self._agent_turns.answer(session.forest, numbers)

    async def _check_turns_left(self, session: Session, call: GenerateCall) -> None:
        """Check that a session may have further answers; raises Refused and ends it otherwise."""
        most, used = self._rules.max_turns, session.forest.used
        if used >= most:
            session.end(FinishReason.MAX_TURNS)
            await self._record(session)
            raise Refused(Refusal.ENDED, over(call.session, f"it has had {most} answers, the most of a sample"))
        if used + call.n > most:
            detail = f"n = {call.n} is more than the {most - used} answers that are left of agent.max_turns = {most}"
            raise Refused(Refusal.INVALID, f"{detail}; ask for fewer")


def _renew(session: Session, call: GenerateCall) -> None:
    """Renew the lease of a session after an answer; raises Refused if it is no longer held."""
    check_current(session, call)
    session.alive_until = time.monotonic() + session.lease
