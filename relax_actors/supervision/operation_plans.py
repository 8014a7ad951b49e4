"""How operations begin: the state in which each first changes something, and the plan that says what."""

from __future__ import annotations

from dataclasses import dataclass

from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OperationPlan, OperationRequest
from relax_actors.operations import Operation, OperationLog, State
from relax_actors.operations.plan import check_role, plan_engine, plan_scale
from relax_actors.operations.progress import Report
from relax_actors.roles import role_names, unscalable_roles
from relax_actors.supervision.desired import Desired
from relax_actors.supervision.engine_watch import EngineWatch
from relax_actors.supervision.operation_times import OperationTimes
from relax_actors.supervision.replacement import Replacement
from relax_actors.supervision.role_changes import RoleChanges
from relax_actors.supervision.role_moves import RoleMoves

CHECK_SECONDS = 30.0
"""Time for an external engine to answer."""
LEASE_SECONDS = 60.0
"""Time for actors that start to report which code they run."""


@dataclass(frozen=True, slots=True)
class Begun:
    """First state of an operation after PENDING, its plan, and a reason if there is nothing to do."""

    state: State
    plan: OperationPlan | None = None
    reason: str = ""


class Plans:
    """Plans operations. All methods run in the thread of `Operations`, whose parts are passed in."""

    def __init__(
        self,
        log: OperationLog,
        desired: Desired,
        roles: RoleChanges,
        moves: RoleMoves,
        replacement: Replacement,
        engines: EngineWatch,
        times: OperationTimes,
    ) -> None:
        self._log, self._desired, self._roles, self._moves = log, desired, roles, moves
        self._replacement, self._engines, self._times = replacement, engines, times

    def begin(self, operation: Operation, config: Config, report: Report) -> Begun | None:
        """Plan an operation without a plan; return None if it must wait.

        Raises:
            ConfigError: it cannot be done.
        """
        request = operation.request
        match request.kind:
            case "scale":
                return self._scale(request, config, report)
            case "add_engine":
                return self._add_engine(operation, config, report)
            case "remove_engine":
                return Begun(State.DRAINING, self._removal(request, report))
            case "replace_role":
                return self._replace(operation, config, report)
            case "move_role":
                return self._move(request, config, report)
        plan = self._roles.plan(request, config, report.nodes)
        return Begun(State.CREATING if plan.after else State.DRAINING, plan)

    def _scale(self, request: OperationRequest, config: Config, report: Report) -> Begun:
        check_role(request.role, role_names(config), unscalable_roles(config, [request.role]))
        plan = plan_scale(request, report.nodes, lambda node: self._desired.wanted(node, request.role))
        if plan.after == plan.before:
            return Begun(State.ACTIVE, plan, f"{request.role} has {plan.before} actors")
        if problems := self._desired.lacking(plan, request.role):
            raise ConfigError(*problems)
        return Begun(State.CREATING if plan.after > plan.before else State.DRAINING, plan)

    def _move(self, request: OperationRequest, config: Config, report: Report) -> Begun:
        plan = self._moves.plan(request, config, report)
        if plan.source == plan.node:
            return Begun(State.ACTIVE, plan, f"{request.role} is on node {plan.node} {plan.node_name} already")
        return Begun(State.DRAINING if plan.source >= 0 else State.CREATING, plan)

    def _replace(self, operation: Operation, config: Config, report: Report) -> Begun | None:
        role, nodes = operation.request.role, report.nodes
        names = [f"{role}.{n}" for node in nodes.values() for n in node.actors(role)]
        silent = [name for name in names if name not in report.leases]
        if silent and self._times.age(operation.id) < LEASE_SECONDS:
            return None  # which code they run is not known before they report it
        plan = self._replacement.plan(role, config, nodes, report.leases)
        if all(report.leases.get(name, {}).get("code") == plan.code for name in plan.actors):
            return Begun(State.ACTIVE, plan, f"{role} runs this code already")
        return Begun(State.REPLACING, plan)

    def _add_engine(self, operation: Operation, config: Config, report: Report) -> Begun | None:
        """Check an external engine before its client starts.

        Raises:
            ConfigError: it does not answer in time, or is none for this run.
        """
        node = report.nodes[0]
        if "rollout" not in node.roles:
            msg = f"node 0 {node.name}, that of `relax up`, has no rollouts; start it with role rollout to add engines"
            raise ConfigError(msg)
        if operation.state is State.PENDING:
            return Begun(State.CONNECTING)
        engines = [o for o in self._log.read().engines() if o.id != operation.id]
        if known := [o.id for o in engines if o.request.url == operation.request.url]:
            msg = f"{operation.request.url} is engine {known[0]} of this run already"
            raise ConfigError(msg)
        late = self._times.age(operation.id, State.CONNECTING) > (operation.request.seconds or CHECK_SECONDS)
        if not self._engines.check(config, operation.request, is_last_try=late):
            return None
        taken = [name for o in engines if o.plan is not None for name in o.plan.actors]
        return Begun(State.HEALTH_CHECKING, plan_engine(node, taken))

    def _removal(self, request: OperationRequest, report: Report) -> OperationPlan:
        known = {o.id: o for o in self._log.read().engines()}
        if request.engine not in known or (plan := known[request.engine].plan) is None:
            ids = ", ".join(map(str, known)) or "none"
            msg = f"the run has no engine {request.engine}; its engines are {ids}"
            raise ConfigError(msg)
        others = [name for node in report.nodes.values() for name in node.children if name.startswith("rollout.")]
        if not set(others) - set(plan.actors):
            msg = f"engine {request.engine} is the last rollout of the run; add another before you remove it"
            raise ConfigError(msg)
        return OperationPlan(plan.node, plan.node_name, len(known), len(known) - 1, plan.actors)
