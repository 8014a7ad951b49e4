"""Plans of operations, pure: from the request and what nodes report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OperationPlan, OperationRequest
from relax_actors.operations.states import History, State

SPAN = 1000
"""Actors of a role that a node may have; those on node k are numbered from `k * SPAN`."""
MOST_NODES = 9_999
FIRST_ENGINE = MOST_NODES * SPAN
"""Number of the first rollout actor that is the client of an external engine; they belong to the node of `relax up`."""
MOST_ENGINES = SPAN


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as its lease shows it.

    Attributes:
        number: of the node.
        name: of the node.
        since: seconds since 1970 at which its supervisor started.
        children: states of its actors by name: `phase`, `pid`, `restarts`.
    """

    number: int
    name: str
    since: float
    children: Mapping[str, Mapping[str, Any]]

    def actors(self, role: str) -> list[int]:
        """Return a role's actors that stay, by number, without clients of engines."""
        named = (name.rpartition(".") for name, state in self.children.items() if state.get("phase") != "stopping")
        numbers = [int(number) for own, _, number in named if own == role and number.isdigit()]
        return sorted(number for number in numbers if number < FIRST_ENGINE)

    @property
    def roles(self) -> set[str]:
        """Roles with actors on the node."""
        return {name.rpartition(".")[0] for name in self.children}


def nodes_of(leases: Mapping[str, Mapping[str, Any]]) -> dict[int, NodeView]:
    """Return nodes by number, from leases; malformed fields are left out."""
    nodes = {}
    for key, lease in leases.items():
        kind, _, number = key.partition(".")
        children, since = lease.get("children"), lease.get("since")
        if kind != "node" or not number.isdigit() or not isinstance(children, dict):
            continue
        states = {str(name): state for name, state in children.items() if isinstance(state, dict)}
        began = float(since) if isinstance(since, int | float) else 0.0
        nodes[int(number)] = NodeView(int(number), str(lease.get("name", ""))[:200], began, states)
    return nodes


def check_role(role: str, roles: Collection[str], fixed: Mapping[str, str]) -> None:
    """Check that the number of actors of a role can change.

    Args:
        role: name of the role.
        roles: roles of the run.
        fixed: those of them whose number cannot change, each with the reason; see `roles.unscalable_roles`.

    Raises:
        ConfigError: the run has no such role, or its number cannot change.
    """
    if role not in roles:
        msg = f"the run has no role {role[:80]!r}; its roles are {', '.join(roles)}"
        raise ConfigError(msg)
    if role in fixed:
        msg = f"{role} {fixed[role]}"
        raise ConfigError(msg)


def plan_scale(
    request: OperationRequest,
    nodes: Mapping[int, NodeView],
    wanted: Callable[[NodeView], int | None] = lambda _: None,
) -> OperationPlan:
    """Plan a change of the number of actors of a role on one node.

    Args:
        request: of kind "scale".
        nodes: nodes of the run by number.
        wanted: returns how many actors a node should have now, if it is known: those that it has may be fewer while
            they start, or more while they leave.

    Raises:
        ConfigError: no node or several nodes fit, or the number is out of bounds.
    """
    node = choose_node(nodes, request.role, request.node)
    known = wanted(node)
    have = len(node.actors(request.role)) if known is None else known
    after = have + request.delta if request.target is None and request.delta is not None else request.target
    if after is None or not 0 < after < SPAN:
        msg = (
            f"{request.role} would have {after} actors on node {node.number} {node.name}, which has {have} now; "
            f"a role has 1 to {SPAN - 1} actors on a node"
        )
        raise ConfigError(msg)
    first = node.number * SPAN
    changed = range(have, after) if after > have else range(after, have)
    actors = [f"{request.role}.{first + n}" for n in changed]
    return OperationPlan(node.number, node.name, have, after, actors)


def wanted_by(history: History, role: str) -> Callable[[NodeView], int | None]:
    """Return a function: actors of a role on a node after the operations so far.

    It returns None if no operation says so: before the first, or after `relax up` has started the run again, whose
    configuration then counts.
    """
    planned = [
        o for o in history.operations.values() if o.request.kind == "scale" and o.request.role == role and o.plan
    ]

    def wanted(node: NodeView) -> int | None:
        for operation in reversed(planned):
            plan = operation.plan
            is_own = plan is not None and (plan.node, plan.node_name) == (node.number, node.name)
            if plan is None or not is_own or (node.number == 0 and max(operation.times.values()) < node.since):
                continue
            return plan.before if operation.state in (State.FAILED, State.CANCELLED) else plan.after
        return None

    return wanted


def choose_node(nodes: Mapping[int, NodeView], role: str, wanted: str) -> NodeView:
    """Return the node on which to change a role.

    Args:
        nodes: nodes of the run by number.
        role: name of the role.
        wanted: number or name of the node; empty for the node of `relax up` if it has the role, else the only one.

    Raises:
        ConfigError: no node has the role, or several do.
    """
    candidates = [node for _, node in sorted(nodes.items()) if role in node.roles]
    if wanted:
        candidates = [node for node in candidates if wanted in (str(node.number), node.name)]
    elif candidates and candidates[0].number == 0:
        return candidates[0]
    if len(candidates) == 1:
        return candidates[0]
    known = "; ".join(f"{n} {node.name}: {' '.join(sorted(node.roles))}" for n, node in sorted(nodes.items()))
    which = f"no node {wanted[:80]!r} runs {role}" if wanted else f"{role}: on no node, or on several; choose a node"
    msg = f"{which}; nodes are {known or 'not up yet'}"
    raise ConfigError(msg)


def plan_engine(node: NodeView, taken: Collection[str]) -> OperationPlan:
    """Plan the rollout actor that is the client of one more external engine.

    Args:
        node: the node of `relax up`.
        taken: names of the actors of the other engines.

    Raises:
        ConfigError: the run has too many engines.
    """
    names = (f"rollout.{FIRST_ENGINE + n}" for n in range(MOST_ENGINES))
    free = next((name for name in names if name not in taken and name not in node.children), None)
    if free is None:
        msg = f"the run has {MOST_ENGINES} external engines already; remove one first"
        raise ConfigError(msg)
    return OperationPlan(node.number, node.name, len(taken), len(taken) + 1, [free])
