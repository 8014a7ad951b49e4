"""States of operations as a pure state machine over the cells of the log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from relax_actors.messages.operations import OperationPlan, OperationRequest, OperationStep


class State(StrEnum):
    """State of an operation."""

    PENDING = "PENDING"
    """It is recorded, and waits for the run's supervisor."""
    CREATING = "CREATING"
    """The new actors get processes."""
    CONNECTING = "CONNECTING"
    """The new actors load their code and connect; an external engine is asked what it serves."""
    HEALTH_CHECKING = "HEALTH_CHECKING"
    """The new actors must show signs of life at the broker."""
    WEIGHT_SYNCING = "WEIGHT_SYNCING"
    """The new actors fetch and verify weights."""
    READY = "READY"
    """The new actors have verified weights, and ask for rows."""
    ACTIVE = "ACTIVE"
    """The new actors take part. The end of an operation that adds actors."""
    DRAINING = "DRAINING"
    """The actors that leave finish their rows, or return them."""
    REMOVING = "REMOVING"
    """The processes have ended; what they held is released."""
    REMOVED = "REMOVED"
    """The end of an operation that removes actors."""
    REPLACING = "REPLACING"
    """The actors get other code, one after the other; each must finish a row before the next."""
    RETURNING = "RETURNING"
    """The new code failed; the actors that had it get the previous code back. The operation ends as FAILED."""
    FAILED = "FAILED"
    """The operation ended with a reason, and what it had started was removed."""
    CANCELLED = "CANCELLED"
    """A client cancelled the operation, and what it had started was removed."""


OUT = (
    State.PENDING,
    State.CREATING,
    State.CONNECTING,
    State.HEALTH_CHECKING,
    State.WEIGHT_SYNCING,
    State.READY,
    State.ACTIVE,
)
"""States of an operation that adds actors, in order."""
IN = (State.PENDING, State.DRAINING, State.REMOVING, State.REMOVED)
"""States of an operation that removes actors, in order."""
CHANGE = (State.PENDING, State.REPLACING, State.ACTIVE)
"""States of an operation that replaces code, in order."""
MOVE = (State.PENDING, State.DRAINING, State.REMOVING, *OUT[1:])
"""States of an operation that moves a role to another node, in order."""
ENDS = frozenset({State.ACTIVE, State.REMOVED, State.FAILED, State.CANCELLED})
CANCELLABLE = frozenset({State.PENDING, State.CREATING, State.CONNECTING})
ROLE_KINDS = ("add_role", "remove_role", "replace_role", "move_role")
"""Kinds of operations that change the roles of a run, their code or their node."""
KINDS = ("scale", "add_engine", "remove_engine", *ROLE_KINDS)
_STATES = frozenset(state.value for state in State)
_NEXT: dict[State, set[State]] = {state: {State.FAILED} for state in State if state not in ENDS}
for _path in (OUT, IN, CHANGE, MOVE, (State.REPLACING, State.RETURNING)):
    for _before, _after in pairwise(_path):
        _NEXT[_before].add(_after)
_NEXT[State.PENDING] |= {State.ACTIVE, State.CONNECTING}  # nothing to do; an external engine has no process to create
for _state in CANCELLABLE:
    _NEXT[_state].add(State.CANCELLED)


def may_follow(before: State, after: State) -> bool:
    """Whether an operation may go from one state to another."""
    return after in _NEXT.get(before, ())


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation, as its cells tell.

    Attributes:
        id: number of its first cell.
        request: what it is to do.
        state: current state.
        plan: what it changes; None before it begins.
        reason: why it failed, was cancelled, or had nothing to do.
        times: seconds since 1970 at which it entered each state.
    """

    id: int
    request: OperationRequest
    state: State = State.PENDING
    plan: OperationPlan | None = None
    reason: str = ""
    times: dict[State, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDS

    @property
    def subject(self) -> tuple[str, ...]:
        """What it changes: two operations with one subject cannot run at the same time."""
        return subject_of(self.request)

    def shown(self) -> dict[str, Any]:
        """Return the operation as JSON for people and programs; it holds no secret."""
        request = {
            name: value
            for name in ("kind", "role", "target", "delta", "node", "url", "engine", "force", "author")
            if (value := getattr(self.request, name)) not in (None, "", False)
        }
        plan = self.plan
        return {
            "id": self.id,
            "state": self.state.value,
            "is_over": self.is_over,
            "reason": self.reason,
            "request": request,
            "node": None if plan is None else {"number": plan.node, "name": plan.node_name},
            "before": None if plan is None else plan.before,
            "after": None if plan is None else plan.after,
            "source": None if plan is None or plan.source < 0 else {"number": plan.source, "name": plan.source_name},
            "actors": [] if plan is None else list(plan.actors),
            "code": None if plan is None or not plan.code else {"new": plan.code, "old": plan.old_code},
            "times": {state.value: round(seconds, 3) for state, seconds in self.times.items()},
        }


def subject_of(request: OperationRequest) -> tuple[str, ...]:
    """Return what a request changes; see `Operation.subject`."""
    if request.kind == "add_engine":
        return "engine", request.url
    if request.kind == "remove_engine":
        return "engine", str(request.engine)
    return "scale", request.role


@dataclass(frozen=True, slots=True)
class History:
    """All operations of a run.

    Attributes:
        operations: by number, in order.
        last: number of the last cell; 0 before the first.
    """

    operations: dict[int, Operation] = field(default_factory=dict)
    last: int = 0

    def extended(self, steps: Iterable[tuple[int, OperationStep | None]]) -> History:
        """Return the history with further cells; invalid ones change nothing.

        Args:
            steps: numbers of cells and their content, None for a malformed cell, in stream order.
        """
        operations, last = dict(self.operations), self.last
        for number, step in steps:
            last = max(last, number)
            if step is None or step.state not in _STATES:
                continue
            state, known = State(step.state), operations.get(step.operation)
            if known is None:
                if step.operation == number and state is State.PENDING and step.request is not None:
                    operations[number] = Operation(number, step.request, times={state: step.time})
            elif may_follow(known.state, state):
                operations[known.id] = replace(
                    known,
                    state=state,
                    plan=step.plan or known.plan,
                    reason=step.reason or known.reason,
                    times={**known.times, state: step.time},
                )
        return History(operations, last)

    @property
    def running(self) -> list[Operation]:
        """Operations that have not ended."""
        return [operation for operation in self.operations.values() if not operation.is_over]

    def with_key(self, key: str) -> Operation | None:
        """Return the operation with an idempotency key, if there is one."""
        return next((o for o in self.operations.values() if key and o.request.key == key), None)

    def engines(self) -> list[Operation]:
        """Return operations whose external engine should have an actor now."""
        gone = {
            o.request.engine
            for o in self.operations.values()
            if o.request.kind == "remove_engine" and o.state in (State.DRAINING, State.REMOVING, State.REMOVED)
        }
        return [
            o
            for o in self.operations.values()
            if o.request.kind == "add_engine"
            and o.plan is not None
            and o.state not in (State.FAILED, State.CANCELLED)
            and o.id not in gone
        ]
