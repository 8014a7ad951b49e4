"""The run's environment in sessions of agents, who reset and step it over the gateway.

Invariant: an agent gets no answer of an environment that is not in the log of its row. An actor that takes the row over
opens the environment again with the recorded actions, and answers repeated steps from the record.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relax_actors.data.media_fields import PART_TYPES
from relax_actors.messages import EnvironmentAnswer
from relax_actors.messages.environment import OPENED
from relax_actors.messages.generate import Refusal, SessionCall
from relax_actors.messages.session_log import SessionStep
from relax_actors.runtime.seeds import derive_seed
from relax_actors.sessions.environment import EnvironmentFailedError, SessionEnvironment
from relax_actors.sessions.service import Refused
from relax_actors.sessions.session_book import Session

if TYPE_CHECKING:  # `relax check` loads every role, and needs no NATS
    from relax_actors.envs.client import EnvironmentClient

Message = dict[str, Any]
Record = Callable[[Session, SessionStep], Awaitable[None]]
"""Writes a step to the log of its row."""


class AgentEnvironments:
    """Environments of the sessions of an actor. All coroutines run in the event loop's thread.

    `author` is in requests, so that no answer to an earlier incarnation is taken for one to this one. `record` writes a
    step to the log, `report` says why an environment failed.
    """

    def __init__(
        self,
        hosts: EnvironmentClient,
        author: str,
        max_turns: int,
        record: Record,
        report: Callable[[Session, str], None],
    ) -> None:
        self._hosts, self._author, self._max_turns = hosts, author, max_turns
        self._record, self._report = record, report
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._environments: dict[Session, SessionEnvironment] = {}

    async def step(self, session: Session, call: SessionCall, check: Callable[[], None]) -> EnvironmentAnswer:
        """Reset the environment of a session, or step it; a repeated step gets the recorded answer.

        `call` has the number of the action, from 0, and its text; number -1 resets. `check` raises if this actor does
        not hold the session for the caller any more.

        Raises:
            Refused: the step does not follow, or the environment failed.
            RowTakenError: another actor has the row.
        """
        async with session.stepping:
            check()
            number = call.turn - OPENED
            if number < len(session.steps):
                recorded = session.steps[number]
                if recorded.action != call.action:
                    raise Refused(Refusal.INVALID, f"action {call.turn} of this session was another one")
                return recorded.seen
            if why := self._refusal(session, number):
                raise Refused(Refusal.INVALID, why)
            seen = await self._perform(session, call, check)
            step = SessionStep(session.sample, session.attempt, number, call.action, seen)
            try:
                await self._record(session, step)
            except BaseException:
                self.close(session)  # it has taken an action that is not in the record
                raise
            check()
            if session.steps:  # an environment is restored from its newest state alone
                last = session.steps[-1]
                session.steps[-1] = replace(last, seen=replace(last.seen, state=None))
            session.steps.append(step)
            return seen

    def _refusal(self, session: Session, number: int) -> str:
        """Return why a step that is not recorded cannot be taken."""
        if number > len(session.steps):
            return f"the next turn of the environment is {len(session.steps) + OPENED}, not {number + OPENED}"
        if session.steps and (session.steps[-1].seen.done or session.steps[-1].seen.truncated):
            return "the episode is over; end the session"
        if number > self._max_turns:
            return f"the environment has had {self._max_turns} actions (environment.max_turns); end the session"
        return ""

    async def _perform(self, session: Session, call: SessionCall, check: Callable[[], None]) -> EnvironmentAnswer:
        environment = self._of(session)
        actions = [step.action for step in session.steps[1:]]
        operations = environment.answer(
            [*actions, call.action] if session.steps else [], [step.seen for step in session.steps]
        )
        answer: Any = None  # a generator begins with None
        try:
            while True:
                answer = await self._hosts.ask(operations.send(answer))
                check()
        except StopIteration as end:
            seen: EnvironmentAnswer = end.value
            why = problem_of(seen.messages)
        except EnvironmentFailedError as error:
            why = str(error)
        if why:
            environment.close()
            self._report(session, why[:500])
            raise Refused(Refusal.ENVIRONMENT, "the environment of the session failed; the events of the run say why")
        return seen

    def _of(self, session: Session) -> SessionEnvironment:
        """Return the environment of a session in its present attempt."""
        environment = self._environments.get(session)
        if environment is None or environment.session != session.id:
            self.close(session)
            seed = derive_seed(session.seed, "environment", session.sample)
            environment = self._environments[session] = SessionEnvironment(
                session.id, session.environment_task, seed, self._author, self._hosts.leave, self._counts
            )
        return environment

    def close(self, session: Session) -> None:
        """Close the environment of a session, if it is open; a step under way is lost."""
        if (environment := self._environments.pop(session, None)) is not None:
            environment.close()

    def sweep(self, holds: Callable[[Session], bool]) -> None:
        """Close the environments of sessions that are over, or were given to another agent."""
        for session, environment in list(self._environments.items()):
            if session.state is not None or not holds(session) or environment.session != session.id:
                self.close(session)


def problem_of(messages: Sequence[Message]) -> str:
    """Return why messages cannot be sent to a client; empty if they can."""
    try:
        json.dumps([client_message(message) for message in messages], allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"its observation cannot be written as JSON ({error}); return text, and media as parts of messages"
    return ""


def client_message(message: Message) -> Message:
    """Return a message of an environment as JSON, with media as data URIs, as in OpenAI's API.

    The policy reads it if the client sends it on as it is.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_client_part(part) for part in content]}


def _client_part(part: Any) -> Any:
    kind = PART_TYPES.get(str(part.get("type"))) if isinstance(part, dict) else None
    values = [part, *(value for value in part.values() if isinstance(value, dict))] if kind else []
    data = next((one for value in values for one in value.values() if isinstance(one, bytes)), None)
    if data is None:
        return part
    url = f"data:{kind}/*;base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
