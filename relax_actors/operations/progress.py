"""How far an operation is, as a pure function of what the nodes and actors of a run report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relax_actors.messages.operations import OperationPlan
from relax_actors.operations.plan import SPAN, NodeView
from relax_actors.operations.states import IN, OUT, Operation, State

IDLE_SECONDS = 20.0
"""Time that an actor with new code waits for a row, after which the operation goes on without."""


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a run at one moment.

    Attributes:
        nodes: nodes by number.
        leases: leases of the actors by name.
        weights: version of the newest published weights; -1 before the first.
        with_weights: roles whose actors hold weights.
        time: seconds since 1970.
    """

    nodes: Mapping[int, NodeView]
    leases: Mapping[str, Mapping[str, Any]]
    weights: int
    with_weights: frozenset[str] = frozenset({"rollout"})
    time: float = 0.0

    def node_of(self, plan: OperationPlan) -> NodeView | None:
        """Return the node of a plan; None if it is gone, also if another node has taken its number.

        The node of `relax up` is always number 0; its name may differ after the run was resumed on another host.
        """
        node = self.nodes.get(plan.node)
        return node if node is None or plan.node == 0 or node.name == plan.node_name else None

    def child(self, name: str) -> Mapping[str, Any]:
        """Return the state of an actor's process, on whatever node; empty if no node has it."""
        return next((node.children[name] for node in self.nodes.values() if name in node.children), {})

    def may_return(self, name: str) -> bool:
        """Whether an actor's node is there; true for actors that may run anywhere."""
        return int(name.rpartition(".")[2]) // SPAN in {0, *self.nodes}

    def leases_of(self, plan: OperationPlan) -> list[Mapping[str, Any] | None]:
        """Return leases of a plan's actors, on the plan's node."""
        is_taken = plan.node in self.nodes and self.node_of(plan) is None
        return [None if is_taken else self.leases.get(name) for name in plan.actors]


def next_state(operation: Operation, report: Report) -> State | None:
    """Return the state that an operation has reached; None if unchanged."""
    plan = None if operation.plan is None else leaving(operation.plan, operation.state)
    if plan is None:
        return None
    node = report.node_of(plan)
    states = [] if node is None else [node.children[name] for name in plan.actors if name in node.children]
    leases = report.leases_of(plan)
    if operation.state in IN:
        reached_in = _left(operation.state, plan.node, states, leases, is_up=node is not None)
        has_moved = reached_in is State.REMOVED and operation.request.kind == "move_role"
        return State.CREATING if has_moved else reached_in
    if len(states) < len(plan.actors):
        return None
    is_ready = all(state.get("phase") == "ready" for state in states)
    is_alive = is_ready and _are_alive(states, leases)
    reached = {
        State.CREATING: all(state.get("pid") for state in states),
        State.CONNECTING: is_ready,
        State.HEALTH_CHECKING: is_alive,
        State.WEIGHT_SYNCING: is_alive and _has_weights(operation.request.role, leases, report),
        State.READY: is_alive
        and all(lease and _takes_rows(lease) for lease in leases)
        and (operation.request.kind != "add_role" or has_proved(report, plan.actors)),
    }
    is_over = reached.get(operation.state, False)
    return OUT[OUT.index(operation.state) + 1] if is_over else None


def leaving(plan: OperationPlan, state: State) -> OperationPlan:
    """Return the plan of the node that an operation changes in a state."""
    if state not in IN or plan.source < 0:
        return plan
    return replace(plan, node=plan.source, node_name=plan.source_name)


def _left(
    state: State, node: int, states: list[Mapping[str, Any]], leases: list[Mapping[str, Any] | None], *, is_up: bool
) -> State | None:
    """Return the state that actors which leave have reached."""
    if states:
        return None
    if state is State.DRAINING:
        # A node that joined may leave before its actors did; that of `relax up` comes back with all of them.
        return State.REMOVING if is_up or (node != 0 and not any(leases)) else None
    return State.REMOVED if not any(leases) else None


def _are_alive(states: list[Mapping[str, Any]], leases: list[Mapping[str, Any] | None]) -> bool:
    """Whether the leases are of the present processes, not of former ones."""
    return all(
        lease is not None and lease.get("pid") == state.get("pid") for state, lease in zip(states, leases, strict=True)
    )


def _has_weights(role: str, leases: list[Mapping[str, Any] | None], report: Report) -> bool:
    if role not in report.with_weights:
        return True
    held = [-1 if lease is None else lease.get("weights", -1) for lease in leases]
    return report.weights >= 0 and all(isinstance(version, int) and version >= 0 for version in held)


def has_proved(report: Report, actors: Sequence[str]) -> bool:
    """Whether new code works: an actor handled a row or trained, or all wait long."""
    leases = [report.leases.get(name, {}) for name in actors]
    if any(lease.get("has_worked") is True for lease in leases):
        return True
    idle = [lease.get("doing_since") if lease.get("waits_for") else None for lease in leases]
    return all(isinstance(since, int | float) and report.time - since > IDLE_SECONDS for since in idle)


def _takes_rows(lease: Mapping[str, Any]) -> bool:
    """Whether an actor handles rows, or waits for rows."""
    return bool(lease.get("rows") or lease.get("waits_for"))
