"""The live policy over NATS: requests go to the actors of the role `rollout`.

Requests of one session go to the same actor as long as it lives, so that its engine finds the prefix in its cache.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TypeVar

import nats.errors
import xxhash

from broker.accounts import ANSWER_SECONDS
from broker.codec import decode_fields, encode, open_envelope
from broker.subjects import RowId
from broker.table import Table
from relax_actors.errors import CodecError
from relax_actors.messages.generate import (
    STILL_WORKING,
    CallNote,
    GenerateAnswer,
    GenerateCall,
    GeneratePiece,
    Refusal,
    SessionAnswer,
    SessionCall,
)
from relax_actors.runtime.context import Context
from relax_actors.runtime.finish import ends_row
from relax_actors.runtime.row import FAILURES
from relax_actors.serving.errors import ApiError
from relax_actors.serving.policy import OnPiece
from relax_actors.serving.suspect_calls import MAX_DEATHS, SuspectCalls
from relax_actors.sessions.session_book import row_of

Answer = TypeVar("Answer", GenerateAnswer, SessionAnswer)
LEASE_SECONDS = 1.0
"""Interval at which the leases of the actors are read while requests are under way."""
PAUSE_SECONDS = 0.1
SESSION_SECONDS = 20.0
_ELSEWHERE = (Refusal.ELSEWHERE, Refusal.BUSY)
ROW_SECONDS = 1.0
"""Interval at which a row that has not ended is looked up, while requests wait for its actor to restart."""
MAX_LOOKED = 4096


class RunPolicy:
    """Implements `Policy`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._members: dict[int, int] = {}
        self._looked, self._looking = float("-inf"), asyncio.Lock()
        self._holders: dict[str, int] = {}
        self._notes: set[asyncio.Task[None]] = set()
        self._ended_rows = EndedRows(context.table)
        self._suspects = SuspectCalls()

    async def generate(self, call: GenerateCall, on_piece: OnPiece | None = None) -> GenerateAnswer:
        """Return the answer of an actor; retry on another actor if this one dies or is busy.

        Raises:
            ApiError: no actor answered within `call.seconds`, or actors have died with the call.
        """
        affinity = call.affinity or call.call
        return await self._ask(call, GenerateAnswer, call.session, affinity, call.seconds, on_piece)

    async def delivered(self, session: str, call: str) -> None:
        """Tell the actor that holds a session that its client has the answer to a call."""
        if (n := self._holders.get(session)) is not None:
            self._send_note(n, CallNote(call, arrived=True))

    def _send_note(self, n: int, note: CallNote) -> None:
        """Send a note to an actor in a task of its own: the caller may be cancelled."""
        table = self._context.table

        async def send() -> None:
            with suppress(nats.errors.Error):
                await table.connection.nc.publish(
                    table.subjects.service("generate", n), encode(note, self._context.author)
                )

        task = asyncio.ensure_future(send())
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    async def session(self, call: SessionCall) -> SessionAnswer:
        """Take, renew, show, step or end a session; raises ApiError if no actor answers in time."""
        if call.kind != "take":
            section, seconds = self._context.config.environment, SESSION_SECONDS
            if call.kind == "environment" and section is not None:
                seconds += section.open_seconds + section.step_seconds
            return await self._ask(call, SessionAnswer, call.session, call.session, seconds)
        try:
            members = await self._current(time.monotonic() + SESSION_SECONDS)
        except TimeoutError as error:
            raise _unanswered(SESSION_SECONDS) from error
        for n in _ranked(str(time.monotonic_ns()), members):
            answer = await self._request(n, call, SessionAnswer, SESSION_SECONDS)
            if answer is not None and answer.session:
                self._remember(answer.session, n)
                return answer
        return SessionAnswer()

    async def _ask(
        self,
        call: GenerateCall | SessionCall,
        kind: type[Answer],
        session: str,
        affinity: str,
        seconds: float,
        on_piece: OnPiece | None = None,
    ) -> Answer:
        end = time.monotonic() + seconds
        refusal: Answer | None = None
        with suppress(TimeoutError):
            while (left := end - time.monotonic()) > 0:
                order = _ranked(affinity, await self._current(end))
                if (holder := self._holders.get(session)) in order:
                    order.sort(key=lambda n: n != holder)
                for n in order:
                    answer = await self._send(n, call, kind, end, on_piece)
                    if answer is None or answer.refusal in _ELSEWHERE:
                        refusal = answer or refusal
                        continue
                    if session:
                        self._remember(session, n)
                    return answer
                if session and (why := await self._why_over(session, end)):
                    return kind(refusal=Refusal.ENDED, detail=f"session {session[:128]!r} {why}")
                await asyncio.sleep(min(PAUSE_SECONDS, left))
        if refusal is not None:
            return refusal
        raise _unanswered(seconds)

    async def _send(
        self, n: int, call: GenerateCall | SessionCall, kind: type[Answer], end: float, on_piece: OnPiece | None
    ) -> Answer | None:
        """Send a call to an actor, unless it may have killed others; see `_request`.

        Raises:
            ApiError: it may.
            TimeoutError: its turn has not come until `end`, a time of `time.monotonic`.
        """
        if not isinstance(call, GenerateCall):
            return await self._request(n, call, kind, end - time.monotonic(), on_piece)
        async with asyncio.timeout(end - time.monotonic()), self._suspects.turn(call):
            if await self._may_be_cause(call):
                msg = (
                    f"{self._suspects.deaths(call)} actors have died while they worked on this request, so it is not "
                    "sent again; send another conversation"
                )
                raise ApiError(422, msg, "request_killed_actors")
            answer = await self._request(n, call, kind, end - time.monotonic(), on_piece)
        if answer is not None and answer.refusal not in _ELSEWHERE:
            self._suspects.acquit(call)
        return answer

    async def _may_be_cause(self, call: GenerateCall) -> bool:
        """Whether a call may have killed the actors that died with it.

        Where the row of a session tells that its actors were killed from outside, the call is not the cause.
        """
        limits = self._context.config.supervision
        if self._suspects.deaths(call) < max(1, min(MAX_DEATHS, limits.max_failures - 1)):
            return False
        if (row := row_of(call.session)) is None:
            return True
        failed = await self._context.state.failures("rollout", row)
        return failed.count > 0 or failed.external_kills > limits.max_kills // 2

    async def _why_over(self, session: str, end: float) -> str:
        """Return why a session that no actor holds never comes back; empty if its actor may restart.

        Raises:
            TimeoutError: the broker has not answered until `end`, a time of `time.monotonic`.
        """
        if (row := row_of(session)) is None:
            return "does not exist: it is no id of a session; use the one that POST /sessions returned"
        async with asyncio.timeout(end - time.monotonic()):
            return "is over: its row has ended" if await self._ended_rows.has(row, time.monotonic()) else ""

    def _remember(self, session: str, n: int) -> None:
        """Remember the actor that was last known to hold a session."""
        self._holders.pop(session, None)
        self._holders[session] = n
        while len(self._holders) > 1 << 16:
            del self._holders[next(iter(self._holders))]

    async def _request(
        self,
        n: int,
        call: GenerateCall | SessionCall,
        kind: type[Answer],
        seconds: float,
        on_piece: OnPiece | None = None,
    ) -> Answer | None:
        """Send a call to an actor; None if it is gone, restarted, cut off, or too slow."""
        table, incarnation = self._context.table, self._members.get(n)
        subject, nc = table.subjects.service("generate", n), table.connection.nc
        data = encode(call, self._context.author)
        end, heard, reconnects = time.monotonic() + seconds, time.monotonic(), nc.stats["reconnects"]
        inbox, answer = nc.new_inbox(), None
        try:
            answers = await nc.subscribe(inbox)
            try:
                await nc.publish(subject, data, reply=inbox)
                while (left := end - time.monotonic()) > 0:
                    with suppress(nats.errors.TimeoutError):
                        message = await answers.next_msg(min(left, LEASE_SECONDS))
                        heard = time.monotonic()
                        if message.data == STILL_WORKING:
                            continue
                        if message.data:
                            envelope = open_envelope(message.data)
                            if envelope.type != GeneratePiece.__name__:
                                answer = decode_fields(envelope, kind)
                                return answer
                            if on_piece is not None:
                                on_piece(decode_fields(envelope, GeneratePiece))
                            continue
                        if message.headers:  # the server's: nobody serves the subject
                            return None
                    # A server that was restarted has forgotten the reply subject.
                    is_cut_off = nc.stats["reconnects"] != reconnects or time.monotonic() - heard > ANSWER_SECONDS
                    if is_cut_off or await self._has_died(n, incarnation, call, end):
                        return None
            finally:
                if answer is None and isinstance(call, GenerateCall):
                    self._send_note(n, CallNote(call.call, arrived=False))
                await answers.unsubscribe()
        except (nats.errors.Error, TimeoutError, CodecError) as error:
            self._context.journal.event("call_failed", n=n, error=f"{type(error).__name__}: {error}"[:300])
        return None

    async def _has_died(self, n: int, incarnation: int | None, call: GenerateCall | SessionCall, end: float) -> bool:
        """Whether an incarnation of an actor is gone; a call that it had is then a suspect."""
        if (await self._current(end)).get(n) == incarnation:
            return False
        if incarnation is not None and isinstance(call, GenerateCall):
            self._suspects.blame(call, n, incarnation)
        return True

    async def _current(self, end: float) -> dict[int, int]:
        """Return the incarnation of each actor, from leases read at most `LEASE_SECONDS` ago.

        Raises:
            TimeoutError: the broker has not answered until `end`, a time of `time.monotonic`.
        """
        async with asyncio.timeout(end - time.monotonic()), self._looking:
            if time.monotonic() - self._looked > LEASE_SECONDS:
                leases = await self._context.state.leases("rollout")
                members = {}
                for name, lease in leases.items():
                    with suppress(ValueError):
                        members[int(name.partition(".")[2])] = int(lease["incarnation"])
                self._members, self._looked = members, time.monotonic()
        return self._members


def _unanswered(seconds: float) -> ApiError:
    msg = f"no rollout actor answered within {seconds:g} s; send the request again later"
    return ApiError(504, msg, "timeout", 1.0)


def _ranked(key: str, members: dict[int, int]) -> list[int]:
    """Return actors ordered by a key, so that a new actor changes the first of few keys."""
    return sorted(members, key=lambda n: xxhash.xxh3_64_intdigest(f"{key}|{n}".encode()), reverse=True)


class EndedRows:
    """Rows that have ended. Used in the event loop's thread."""

    def __init__(self, table: Table) -> None:
        self._table = table
        # When a row was looked up, and whether it had ended.
        self._looked: dict[RowId, tuple[float, bool]] = {}

    async def has(self, row: RowId, now: float) -> bool:
        """Whether a row has ended: generated, dropped, quarantined, removed, or never existed.

        Repeats the look-up until the broker answers.
        """
        looked, ended = self._looked.get(row, (float("-inf"), False))
        if ended or now - looked < ROW_SECONDS:
            return ended
        subjects = [self._table.subject(row, field) for field in ("prompt", "trajectory", *FAILURES)]
        prompt, trajectory, *failures = await asyncio.gather(*(self._table.get_async(subject) for subject in subjects))
        ended = prompt is None or trajectory is not None or any(map(ends_row, failures))
        self._looked.pop(row, None)
        self._looked[row] = now, ended
        while len(self._looked) > MAX_LOOKED:
            del self._looked[next(iter(self._looked))]
        return ended
