"""Operations that replace the code of a role, one actor after the other, on whichever node it is.

Both versions of the code are copies in the store. The assignment of the node of `relax up` says which copy each actor
imports, on other nodes too, to which it is published; an actor is restarted when its entry changes. How far the
operation is follows from these entries and from the leases of the actors.
When the run starts again, all actors run the files that are then on disk, and the operation only says how it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_actors.config import Config
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OperationPlan
from relax_actors.operations import Operation, State
from relax_actors.operations.plan import NodeView
from relax_actors.operations.progress import Report, has_proved
from relax_actors.roles import role_names
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.runtime.user_code import code_files, keep_code, kept_code
from relax_actors.supervision.assignment import Assignment, Code
from relax_actors.supervision.code_check import check_same_columns

Leases = Mapping[str, Mapping[str, Any]]


class Replacement:
    """Replaces the code of roles. All methods run in the thread of `Operations`.

    Args:
        folder: folder of the run.
        began: seconds since 1970 at which the root started.
        publish: publishes to the nodes that joined which copies actors import.
    """

    def __init__(self, folder: RunFolder, began: float, publish: Callable[[Mapping[str, Code]], None]) -> None:
        self._folder, self._began, self._publish = folder, began, publish

    def plan(self, role: str, config: Config, nodes: Mapping[int, NodeView], leases: Leases) -> OperationPlan:
        """Copy the code that is on disk, and return what the operation changes.

        Raises:
            ConfigError: the role runs no code of the user, or its actors cannot get this code while the run is up.
        """
        if role not in role_names(config):
            msg = f"the run has no role {role[:80]!r}; its roles are {', '.join(role_names(config))}"
            raise ConfigError(msg)
        actors = [f"{role}.{n}" for _, node in sorted(nodes.items()) for n in node.actors(role)]
        if not actors:
            msg = f"no actor of {role} is up, whose code could be replaced; `relax tree` shows the nodes"
            raise ConfigError(msg)
        node = next(node for _, node in sorted(nodes.items()) if role in node.roles)
        path = Path(self._folder.import_path)
        files = code_files(config, role, path)
        if not files:
            msg = (
                f"{role} runs no module in {path}, and only the modules there can be replaced; to change an installed "
                "package, install it, stop the run and start it again"
            )
            raise ConfigError(msg)
        running = {str(leases.get(name, {}).get("code", "")) for name in actors}
        new = keep_code(config.store_path, files)
        old = self._old_version(config, role, running - {new, ""})
        plan = OperationPlan(node.number, node.name, len(actors), len(actors), actors, new, old)
        if running != {new}:
            check_same_columns(self._folder, role, [kept_code(config.store_path, version) for version in (old, new)])
        return plan

    def _old_version(self, config: Config, role: str, running: set[str]) -> str:
        """Return the version that the actors get back if the new one fails.

        Raises:
            ConfigError: there is no copy of it.
        """
        kept = Assignment.load(self._folder, config).kept.get(role, "")
        for version in [*sorted(running), kept]:
            if kept_code(config.store_path, version) is not None:
                return version
        msg = (
            f"the store holds no copy of the code that {role} runs now, so the actors could not get it back; stop the "
            "run and start it again with the new code"
        )
        raise ConfigError(msg)

    def step(self, operation: Operation, report: Report) -> tuple[State, str] | None:
        """Restart the next actor if it is time; return the state that the operation has reached, with a reason."""
        plan = operation.plan
        if plan is None:
            return None
        if operation.times.get(State.REPLACING, 0.0) < self._began:
            return _after_restart(operation, plan, report)
        actors = [name for name in plan.actors if report.may_return(name)]  # a node may leave meanwhile
        if operation.state is State.RETURNING:
            self._set(plan, dict.fromkeys(plan.actors, Code(plan.old_code, f"{operation.id}-back")), only=operation)
            self._pin(plan, plan.old_code)
            return (State.FAILED, "") if all(_runs(report, name, plan.old_code) for name in actors) else None
        node = Assignment.load(self._folder, self._folder.load_config())
        self._publish(node.code)  # it may have failed after the node's assignment was written
        switched = [name for name in actors if node.code.get(name) == Code(plan.code, str(operation.id))]
        if not all(_runs(report, name, plan.code) and has_proved(report, [name]) for name in switched):
            return None
        rest = [name for name in actors if name not in switched]
        if not rest:
            # Actors of a node that is away start with the new code when it comes back.
            self._set(plan, dict.fromkeys(plan.actors, Code(plan.code, str(operation.id))))
            self._pin(plan, plan.code)
            return State.ACTIVE, ""
        own = {name: node.code.get(name, Code(plan.old_code)) for name in rest[1:]}
        self._set(plan, {**own, rest[0]: Code(plan.code, str(operation.id))})
        self._pin(plan, plan.old_code)
        return None

    def _pin(self, plan: OperationPlan, version: str) -> None:
        """Have actors of the role that start later import a version, whatever is then on disk."""
        role = plan.actors[0].rpartition(".")[0]
        node = Assignment.load(self._folder, self._folder.load_config())
        others = {name: entry for name, entry in node.code.items() if name.rpartition(".")[0] != role}
        own = {name: entry for name, entry in node.code.items() if name in plan.actors}
        self._save(node, {**others, **own, role: Code(version)})

    def _set(self, plan: OperationPlan, code: dict[str, Code], only: Operation | None = None) -> None:
        """Write which copy actors import; with `only`, of the actors that got their copy from this operation."""
        node = Assignment.load(self._folder, self._folder.load_config())
        if only is not None:
            code = {name: entry for name, entry in code.items() if node.code.get(name) == Code(plan.code, str(only.id))}
        self._save(node, {**node.code, **code})

    def _save(self, node: Assignment, code: dict[str, Code]) -> None:
        if (wanted := replace(node, code=code)) != node:
            wanted.save(self._folder)
        self._publish(code)


def _runs(report: Report, name: str, version: str) -> bool:
    return _version(report, name) == version


def _version(report: Report, name: str) -> str | None:
    """Return the version of the code that an actor runs; None unless its present process is ready and alive."""
    state, lease = report.child(name), report.leases.get(name)
    if lease is None or state.get("phase") != "ready" or lease.get("pid") != state.get("pid"):
        return None
    return str(lease.get("code", ""))


def _after_restart(operation: Operation, plan: OperationPlan, report: Report) -> tuple[State, str] | None:
    """Return how an operation ended whose run was started again, with the files that were then on disk."""
    if any(_version(report, name) is None for name in plan.actors):
        return None
    if operation.state is State.REPLACING and all(_runs(report, name, plan.code) for name in plan.actors):
        return State.ACTIVE, "the run was started again, with this code"
    reason = operation.reason or "the run was started again, with the code that is on disk"
    return (State.FAILED if operation.state is State.RETURNING else State.RETURNING), reason
