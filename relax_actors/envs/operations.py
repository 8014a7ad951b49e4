"""Operations on sessions of environments, as a rollout waits for their answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from relax_actors.messages import Act, EnvironmentAnswer, Fault, Open
from relax_actors.messages.environment import OPENED

MAX_ACTION = 1 << 20
"""Characters of an action."""


@dataclass(frozen=True, slots=True)
class Close:
    """End a session; has no answer."""

    session: str


Operation: TypeAlias = Open | Act | Close


@dataclass
class Pending:
    """An operation without an answer."""

    operation: Open | Act
    deadline: float
    member: int | None = None
    sent: float = 0.0
    heard: float = 0.0
    tries: int = 0
    busy: set[int] = field(default_factory=set)

    @property
    def turn(self) -> int:
        """Turn of the answer."""
        operation = self.operation
        return operation.turn if isinstance(operation, Act) else len(operation.actions) + OPENED

    def failed(self, detail: str) -> EnvironmentAnswer:
        """Return an answer that counts against the sample."""
        return EnvironmentAnswer(self.operation.session, self.turn, error=Fault.ENVIRONMENT, detail=detail)

    def lost(self, detail: str) -> EnvironmentAnswer:
        """Return an answer after which the session is opened again."""
        return EnvironmentAnswer(self.operation.session, self.turn, error=Fault.LOST, detail=detail)


def problem_of(operation: Open | Act) -> str:
    """Return why no environment may get an operation; empty if it may."""
    if isinstance(operation, Act) and len(operation.action) > MAX_ACTION:
        return f"the action has {len(operation.action)} characters, at most {MAX_ACTION}; lower rollout.max_tokens"
    return ""


def size_of(operation: Open | Act) -> int:
    """Estimate the bytes of an operation in a request."""
    if isinstance(operation, Act):
        return len(operation.action) + 64
    state = len(operation.state or b"")
    return 1024 + state + sum(map(len, operation.actions)) + 24 * len(operation.digests)
