"""The loop that plays an episode, and the environment of a session; pure.

A loop is a generator: it yields what has to be done, an operation of the environment or the generation of a turn, and
is sent the outcome. It can begin in any place of an episode: the environment is opened again with the actions so far.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from relax_actors.engines.protocols import GenerationRequest
from relax_actors.errors import RelaxError, RowError
from relax_actors.messages import Act, EnvironmentAnswer, Fault, FinishReason, Open
from relax_actors.sessions.episode import Episode
from relax_actors.sessions.session_log import LazyLog

MAX_LOSSES = 20
"""Times that an environment may be lost in one turn before its sample fails."""
Playing: TypeAlias = Generator[Open | Act | GenerationRequest, Any, None]


class EnvironmentFailedError(RelaxError):
    """Failure of the environment of one sample; `fault` is its kind."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault


@dataclass(slots=True, eq=False)
class SessionEnvironment:
    """The environment of a session on one of the actors that host environments.

    Attributes:
        session: id of the session.
        task: the row's task.
        seed: seed of the environment.
        author: incarnation of the actor that holds the session.
        leave: closes the environment of a name.
        counts: counts environments that were opened and lost. All sessions of an actor share it: the number is part of
            the environment's name, so that an answer to an earlier one is never taken for an answer to a later one.
        name: name under which it is open; empty if it is not.
    """

    session: str
    task: Mapping[str, Any]
    seed: int
    author: str
    leave: Callable[[str], None]
    counts: MutableMapping[str, float]
    name: str = ""

    def answer(
        self, actions: Sequence[str], seen: Sequence[EnvironmentAnswer]
    ) -> Generator[Open | Act, EnvironmentAnswer, EnvironmentAnswer]:
        """Return the answer to the last action or reset; open the environment if necessary.

        Args:
            actions: actions of the model so far.
            seen: what was answered to the reset and to all actions before the last one.

        Raises:
            EnvironmentFailedError: the environment failed, or was lost again and again.
        """
        answer = EnvironmentAnswer(self.session, 0, error=Fault.LOST)
        for _ in range(MAX_LOSSES + 1):
            is_open = bool(self.name)
            if not is_open:
                answer = yield self._open(actions[:-1], seen)
            if actions and (is_open or not answer.error):
                answer = yield Act(self.name, len(actions) - 1, actions[-1])
            if not answer.error:
                return answer
            self.close()
            if answer.error not in (Fault.LOST, Fault.BUSY):
                break
            self.counts["sessions_lost"] += 1
        raise EnvironmentFailedError(answer.error, answer.detail)

    def _open(self, actions: Sequence[str], seen: Sequence[EnvironmentAnswer]) -> Open:
        """Return the operation that restores a new environment: by its state or by actions."""
        self.counts["sessions_opened"] += 1
        self.name = f"{self.session}@{self.author}.{self.counts['sessions_opened']:.0f}"
        state = seen[-1].state if actions else None
        digests = [] if state is not None else [answer.digest for answer in seen[1:]]
        return Open(self.name, dict(self.task), self.seed, state, list(actions), digests)

    def close(self) -> None:
        """Close the environment, if it is open; a step under way is lost."""
        if self.name:
            self.leave(self.name)
        self.name = ""


def play(
    session: Episode,
    environment: SessionEnvironment,
    template: GenerationRequest,
    log: LazyLog,
    fail: Callable[[Episode, EnvironmentFailedError], None],
) -> Playing:
    """Play an episode to its end; yield operations of the environment, and requests of turns.

    `log` gets its turns and its end; `fail` restarts or ends an episode whose environment failed.
    """
    try:
        while session.state is None:
            try:
                session.step((yield from environment.answer(session.actions, session.seen)))
            except EnvironmentFailedError as error:
                fail(session, error)
            except RowError as error:
                environment.close()
                fail(session, EnvironmentFailedError(Fault.ENVIRONMENT, f"its observation: {error}"))
            else:
                if session.state is None:
                    log.add(session.say((yield session.ask(template))))
    finally:
        environment.close()
        if session.state is not None and session.reason is not FinishReason.ERROR:
            log.add(session.state)
