"""The run's environment in sessions of agents: an agent resets it and steps it over the gateway.

Invariant: an agent gets no answer of an environment that is not in the log of its row. An actor that takes the row over
opens the environment again with the recorded actions, and answers repeated steps from the record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from relax_actors.messages import Act, EnvironmentAnswer, Fault, Open
from relax_actors.messages.environment import OPENED
from relax_actors.messages.generate import Refusal, SessionCall
from relax_actors.messages.session_log import SessionStep
from relax_actors.runtime.seeds import derive_seed
from relax_actors.sessions.episode_batch import MAX_LOSSES
from relax_actors.sessions.service import Refused
from relax_actors.sessions.session_book import Session

Record = Callable[[Session, SessionStep], Awaitable[None]]
"""Writes a step to the log of its row."""


class Hosts(Protocol):
    """The actors that host environments; see `relax_actors.envs.client.EnvironmentClient`."""

    async def ask(self, operation: Open | Act) -> EnvironmentAnswer:
        """Perform an operation on a session."""

    def leave(self, session: str) -> None:
        """Close a session."""


class AgentEnvironments:
    """Environments of the sessions of an actor. All coroutines run in the event loop's thread.

    Args:
        hosts: host the environments.
        author: of the actor, so that no answer to an earlier incarnation is taken for one to this one.
        record: writes a step to the log.
    """

    def __init__(self, hosts: Hosts, author: str, record: Record) -> None:
        self._hosts, self._author, self._record = hosts, author, record
        self._opened = 0
        # Names under which the environments of sessions are open now.
        self._names: dict[Session, str] = {}
        self._locks: dict[Session, asyncio.Lock] = {}

    async def step(self, session: Session, call: SessionCall, is_current: Callable[[], None]) -> EnvironmentAnswer:
        """Reset the environment of a session, or step it; a repeated step gets the recorded answer.

        Args:
            session: the session.
            call: number of the action, from 0, and its text; number -1 resets.
            is_current: raises if the session is another agent's by now.

        Raises:
            Refused: the step does not follow, or the environment failed.
            RowTakenError: another actor has the row.
        """
        async with self._locks.setdefault(session, asyncio.Lock()):
            is_current()
            number = call.turn - OPENED
            if number < len(session.steps):
                recorded = session.steps[number]
                if recorded.action != call.action:
                    raise Refused(Refusal.INVALID, f"action {call.turn} of this session was another one")
                return recorded.seen
            if number > len(session.steps):
                last = len(session.steps) + OPENED
                raise Refused(Refusal.INVALID, f"the next turn of the environment is {last}, not {call.turn}")
            if session.steps and (session.steps[-1].seen.done or session.steps[-1].seen.truncated):
                raise Refused(Refusal.INVALID, "the episode is over; end the session")
            seen = await self._perform(session, call)
            is_current()
            step = SessionStep(session.sample, session.attempt, number, call.action, seen)
            await self._record(session, step)
            session.steps.append(step)
            return seen

    async def _perform(self, session: Session, call: SessionCall) -> EnvironmentAnswer:
        why = ""
        for _ in range(MAX_LOSSES):
            answer = None if session in self._names else await self._open(session)
            if answer is None or (call.turn >= 0 and not answer.error):
                answer = await self._hosts.ask(Act(self._names[session], call.turn, call.action))
            if not answer.error:
                return answer
            self.close(session)
            why = f"{answer.error}: {answer.detail}"[:500]
            if answer.error not in (Fault.LOST, Fault.BUSY):
                break
        raise Refused(Refusal.ENVIRONMENT, why)

    async def _open(self, session: Session) -> EnvironmentAnswer:
        """Open the environment of a session, and bring it to its last recorded action."""
        self._opened += 1
        name = self._names[session] = f"{session.id}@{self._author}.{self._opened}"
        seed = derive_seed(session.seed, "environment", session.sample)
        task: dict[str, Any] = dict(session.environment_task)
        steps = session.steps
        actions = [step.action for step in steps[1:]]
        state = steps[-1].seen.state if actions else None
        digests = [] if state is not None else [step.seen.digest for step in steps[1:]]
        return await self._hosts.ask(Open(name, task, seed, state, actions, digests))

    def close(self, session: Session) -> None:
        """Close the environment of a session, if it is open."""
        if (name := self._names.pop(session, None)) is not None:
            self._hosts.leave(name)

    def forget(self, session: Session) -> None:
        """Close the environment of a session that is over or was given to another agent."""
        self.close(session)
        self._locks.pop(session, None)
