"""Operations that move a role that owns state to another node.

At most one node has such a role: its lease `owner.<role>` says which. The node that loses the role stops the actor and
releases the lease, and the other node starts the actor once it has the lease. The actor then goes on as after a kill:
durable consumers and checkpoints know nothing of nodes. Where the role is follows from the log of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from broker.leases import RunState
from broker.table import Table
from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OperationPlan, OperationRequest
from relax_actors.operations import History, Operation, State
from relax_actors.operations.plan import NodeView
from relax_actors.operations.progress import Report
from relax_actors.roles import role_names, spec_of
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.assignment import Assignment
from relax_actors.supervision.pools import secrets_of
from relax_actors.supervision.streams import change_run_record, fetch_run_record

NOWHERE = ""
"""Name of the node of a moved role for all nodes that joined while it is on none of them."""


class RoleMoves:
    """Moves roles between nodes. All methods run in the thread of `Operations`.

    Args:
        table: the run's table, of the operator.
        state: its bucket.
        folder: its folder.
        had_ended: whether an operation had ended when the root started: all roles are then where `relax up` and
            `relax node` have started them.
    """

    def __init__(self, table: Table, state: RunState, folder: RunFolder, had_ended: Callable[[int], bool]) -> None:
        self._table, self._state, self._folder, self._had_ended = table, state, folder, had_ended

    def plan(self, request: OperationRequest, config: Config, report: Report) -> OperationPlan:
        """Check a request, and return what it changes.

        Raises:
            ConfigError: the role does not move, there is no such node, or the node cannot have the role.
        """
        role, nodes = request.role, report.nodes
        check_movable(config, role)
        target, name = _target(nodes, request.node), f"{role}.0"
        if report.leases.get(f"node.{target.number}", {}).get("spot") is True and not spec_of(config, role).may_be_spot:
            msg = f"node {target.number} {target.name} is a spot node, which may vanish; move {role} to another node"
            raise ConfigError(msg)
        source = next((node for node in nodes.values() if name in node.children), None)
        if source is None:
            return OperationPlan(target.number, target.name, 0, 1, [name])
        return OperationPlan(target.number, target.name, 1, 1, [name], source=source.number, source_name=source.name)

    def away(self, history: History) -> set[str]:
        """Return the roles that operations have moved, and that are not on the node of `relax up`."""
        return {role for role, operation in self._last(history).items() if _place(operation) != 0}

    def _last(self, history: History) -> dict[str, Operation]:
        moves = [o for o in history.operations.values() if o.request.kind == "move_role" and o.plan is not None]
        return {o.request.role: o for o in moves if not self._had_ended(o.id)}

    def apply(self, history: History) -> None:
        """Give the node of `relax up` the roles that it should have, and publish to the others which they have."""
        if not (last := self._last(history)):
            return
        config = self._folder.load_config()
        known = node = Assignment.load(self._folder, config)
        published: dict[str, str] = {}
        for role, operation in last.items():
            if role not in role_names(config):
                continue
            place = _place(operation)
            if place is not None or not operation.is_over:  # else a node that joins with the role has it
                published[role] = NOWHERE if place in (0, None) else _name(operation)
            if place != 0:
                node = node.without_role(role) if role in node.roles else node
            elif role not in node.roles:
                node = node.with_role(config, role)
        moved = [role for role in last if role in node.roles]
        node = replace(node, moved=moved, kept=known.kept, on_probation=_on_trial(node, last))
        if node != known:
            node.save(self._folder)
        record = self._table.call(fetch_run_record(self._state))
        if record is not None and record.moved != published:
            self._table.call(change_run_record(self._state, lambda record: replace(record, moved=published)))


def _target(nodes: Mapping[int, NodeView], wanted: str) -> NodeView:
    """Return the node with a number or a name.

    Raises:
        ConfigError: there is none, or several nodes have this name.
    """
    numbered = [node for node in nodes.values() if wanted == str(node.number)]
    meant = numbered or [node for node in nodes.values() if wanted == node.name]
    if len(meant) != 1:
        known = "; ".join(f"{n} {node.name}" for n, node in sorted(nodes.items()))
        several = f"{len(meant)} nodes with the name {wanted[:80]!r}, so give a number"
        msg = f"the run has {several if meant else f'no node {wanted[:80]!r}'}; its nodes are {known}"
        raise ConfigError(msg)
    return meant[0]


def _on_trial(node: Assignment, last: Mapping[str, Operation]) -> list[str]:
    """Return the actors of a node whose failures fail their operation, those of roles that come included."""
    coming = [role for role, operation in last.items() if role in node.roles and not operation.is_over]
    return sorted({*node.on_probation, *(f"{role}.0" for role in coming)})


def _place(operation: Operation) -> int | None:
    """Return the number of the node on which a role should be; None for none."""
    plan = operation.plan
    if plan is None or operation.state in (State.DRAINING, State.REMOVING):
        return None
    if operation.state in (State.FAILED, State.CANCELLED):
        return plan.source if plan.source >= 0 else None
    return plan.node


def _name(operation: Operation) -> str:
    """Return the name of the node on which a role should be."""
    plan = operation.plan
    is_undone = operation.state in (State.FAILED, State.CANCELLED)
    return NOWHERE if plan is None else plan.source_name if is_undone else plan.node_name


def check_movable(config: Config, role: str) -> None:
    """Check that a role can be on another node while the run is up.

    Raises:
        ConfigError: the run has no such role, or it does not own state, shares devices, or gets secrets.
    """
    if role not in role_names(config):
        msg = f"the run has no role {role[:80]!r}; its roles are {', '.join(role_names(config))}"
        raise ConfigError(msg)
    if not spec_of(config, role).single:
        able = ", ".join(name for name in role_names(config) if spec_of(config, name).single)
        msg = (
            f"{role} is a pool, whose actors are on any node: `relax node --role {role}` adds some, and `relax scale` "
            f"changes their number. Roles that move are {able}"
        )
        raise ConfigError(msg)
    if (group := config.placement.device_of(role)) is not None:
        others = ", ".join(other for other in config.placement.colocate[group] if other != role)
        msg = f"{role} shares devices with {others} (placement.colocate), which a move would separate"
        raise ConfigError(msg)
    if secrets := sorted(secrets_of(config, [role])):
        msg = f"{role} gets secrets {secrets}, which a node has from its start; start the run again with the role there"
        raise ConfigError(msg)
