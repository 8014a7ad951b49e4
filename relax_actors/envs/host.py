"""Sessions of one actor: opens them, passes turns on, and ends those that hang or crash.

Invariant: an operation may be repeated. A turn that was taken is not taken again, its answer is given again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from broker.codec import MAX_CELL_BYTES, decode, encode
from relax_actors.config.environment import EnvironmentSection
from relax_actors.envs.forks import Fork, Forks
from relax_actors.envs.frames import frame, read_frame
from relax_actors.envs.session import AUTHOR, CLOSE, REUSABLE
from relax_actors.errors import CodecError
from relax_actors.messages import Act, EnvironmentAnswer, Fault, Open
from relax_actors.messages.environment import OPENED

EVICT_SECONDS = 60.0
"""Idle time after which a session makes room for another; its next turn opens it again."""
IDLE_SECONDS = 900.0
"""Idle time after which a session is ended: its rollout is gone."""
CLOSE_SECONDS = 5.0


@dataclass
class HostedSession:
    """A session and its last answer."""

    name: str
    holder: str
    request: bytes
    fork: Fork | None = None
    turn: int = OPENED - 1
    running: asyncio.Task[EnvironmentAnswer] | None = None
    used: float = field(default_factory=time.monotonic)

    @property
    def is_ready(self) -> bool:
        """Whether no operation is running."""
        return self.running is None or self.running.done()

    def is_idle(self, before: float) -> bool:
        """Whether the last operation ended before a time of the monotonic clock."""
        return self.used < before and self.is_ready


class SessionHost:
    """Hosts sessions; all methods run in the event loop.

    `report` is called with session, turn and text of each failure of an environment.
    """

    def __init__(
        self, section: EnvironmentSection, forks: Forks, report: Callable[[str, int, str], None] = lambda *_: None
    ) -> None:
        self._section, self._forks, self._report = section, forks, report
        self._sessions: dict[str, HostedSession] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._free: list[Fork] = []
        self.turns = self.faults = self.replayed = 0

    @property
    def count(self) -> int:
        """Sessions that have a process or are about to get one."""
        return sum(session.fork is not None or not session.is_ready for session in self._sessions.values())

    async def open(self, request: Open, holder: str) -> EnvironmentAnswer:
        """Open a session for a holder, and take its recorded turns again."""
        data = encode(request, AUTHOR)
        known = self._sessions.get(request.session)
        if known is not None and (known.holder, known.request) == (holder, data) and known.running is not None:
            return await asyncio.shield(known.running)
        if known is not None:
            self._forget(known)
        session = self._sessions[request.session] = HostedSession(request.session, holder, data)
        session.running = asyncio.ensure_future(self._open(session, request))
        return await asyncio.shield(session.running)

    async def act(self, request: Act, holder: str) -> EnvironmentAnswer:
        """Take a turn of a session, or give its answer again."""
        session = self._sessions.get(request.session)
        if session is None or session.holder != holder or session.running is None:
            return _lost(request, "this actor has no such session")
        session.used = time.monotonic()
        if request.turn == session.turn:
            return await asyncio.shield(session.running)
        if request.turn != session.turn + 1 or not session.is_ready:
            return _lost(request, f"the session is at turn {session.turn}")
        session.turn = request.turn
        session.running = asyncio.ensure_future(self._act(session, request))
        return await asyncio.shield(session.running)

    def close(self, name: str, holder: str) -> None:
        """Close a session, if the holder has it."""
        session = self._sessions.get(name)
        if session is not None and session.holder == holder:
            self._forget(session)

    def sweep(self, idle_seconds: float = IDLE_SECONDS) -> None:
        """End the sessions that have been idle for long."""
        before = time.monotonic() - idle_seconds
        for session in [session for session in self._sessions.values() if session.is_idle(before)]:
            self._forget(session)

    async def end(self) -> None:
        """End all sessions."""
        for session in list(self._sessions.values()):
            self._forget(session)
        await self.closed()
        while self._free:
            await self._forks.end(self._free.pop())

    async def closed(self) -> None:
        """Wait until the environments of closed sessions have been closed."""
        if self._ending:
            await asyncio.wait(self._ending)

    async def _open(self, session: HostedSession, request: Open) -> EnvironmentAnswer:
        turn = session.turn = len(request.actions) + OPENED
        if self.count > self._section.sessions and not self._evict():
            del self._sessions[session.name]
            return EnvironmentAnswer(
                session.name, turn, error=Fault.BUSY, detail=f"{self._section.sessions} sessions are open"
            )
        self.replayed += 0 if request.state is not None else len(request.actions)
        fork = await self._process()
        if self._sessions.get(session.name) is not session:  # closed while its process started
            self._free.append(fork)
            return EnvironmentAnswer(session.name, turn, error=Fault.LOST, detail="the session has been closed")
        session.fork = fork
        seconds = self._section.open_seconds
        return await self._ask(session, encode(request, AUTHOR), turn, seconds, "environment.open_seconds")

    async def _process(self) -> Fork:
        """Return a process whose last session was closed in order, or a new one."""
        while self._free:
            fork = self._free.pop()
            if not fork.reader.at_eof():
                return fork
            await self._forks.end(fork)
        return await self._forks.start(self._section.cpu_seconds)

    async def _act(self, session: HostedSession, request: Act) -> EnvironmentAnswer:
        self.turns += 1
        if session.fork is None:
            return _lost(request, "the session has failed")
        seconds = self._section.step_seconds
        return await self._ask(session, encode(request, AUTHOR), request.turn, seconds, "environment.step_seconds")

    async def _ask(
        self, session: HostedSession, data: bytes, turn: int, seconds: float, setting: str
    ) -> EnvironmentAnswer:
        """Pass an operation to the session's process; its failure is an answer as well."""
        fork = session.fork
        assert fork is not None  # noqa: S101 the callers have checked it
        try:
            fork.writer.write(frame(data))
            async with asyncio.timeout(seconds):
                answer = decode(await read_frame(fork.reader, MAX_CELL_BYTES), EnvironmentAnswer)
            if answer.session != session.name or (answer.turn != turn and not answer.error):
                msg = f"it answers session {answer.session[:80]!r}, turn {answer.turn}"
                raise CodecError(msg)  # noqa: TRY301 as if it did not decode
        except TimeoutError:
            problem = f"no answer within {setting} = {seconds:g}"
        except CodecError as error:
            problem = f"its process wrote something else than an answer: {error}"
        except (asyncio.IncompleteReadError, ConnectionError):
            problem = ""
        else:
            session.used = time.monotonic()
            if not answer.error:
                return answer
            problem = answer.detail
            if answer.error == Fault.REPLAY:
                await self._end(session)
                return answer
        ended = await self._end(session)
        return self._fault(session, turn, problem or f"its process {ended}")

    def _fault(self, session: HostedSession, turn: int, problem: str) -> EnvironmentAnswer:
        self.faults += 1
        self._report(session.name, turn, problem)
        return EnvironmentAnswer(session.name, turn, error=Fault.ENVIRONMENT, detail=problem)

    async def _end(self, session: HostedSession) -> str:
        fork, session.fork = session.fork, None
        return "" if fork is None else await self._forks.end(fork)

    def _forget(self, session: HostedSession) -> None:
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
        fork, session.fork = session.fork, None
        if fork is not None:
            task = asyncio.ensure_future(self._close(session, fork))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _close(self, session: HostedSession, fork: Fork) -> None:
        """Let the environment close, then keep its process for another session, or end it."""
        if session.is_ready:
            fork.writer.write(frame(CLOSE))
            with suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError, CodecError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    if await read_frame(fork.reader, MAX_CELL_BYTES) == REUSABLE:
                        self._free.append(fork)
                        return
        await self._forks.end(fork)

    def _evict(self) -> bool:
        """End the session that has been idle for longest, if that is long."""
        before = time.monotonic() - EVICT_SECONDS
        idle = [s for s in self._sessions.values() if s.fork is not None and s.is_idle(before)]
        if idle:
            self._forget(min(idle, key=lambda session: session.used))
        return bool(idle)


def _lost(request: Act, detail: str) -> EnvironmentAnswer:
    return EnvironmentAnswer(request.session, request.turn, error=Fault.LOST, detail=detail)
