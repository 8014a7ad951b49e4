"""What operations set for the nodes of a run: numbers of actors, external engines, and actors that leave at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from broker.leases import RunState
from broker.table import Table
from relax_actors.config import Config, validate
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OperationPlan
from relax_actors.operations.engines import read_key, save_engines
from relax_actors.operations.plan import NodeView
from relax_actors.operations.states import Operation
from relax_actors.roles import built_in_spec, role_names, section_of
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.assignment import Assignment, Code
from relax_actors.supervision.gpu_leases import lacking_gpus
from relax_actors.supervision.streams import RunRecord, fetch_run_record, publish_scale


@dataclass(frozen=True, slots=True)
class Change:
    """Number of actors that a role should have on the node of a plan.

    Attributes:
        operation: number of the operation.
        plan: of the operation.
        role: name of the role.
        number: actors to have; None to leave it.
        expelled: names of actors that leave at once, instead of finishing their rows.
    """

    operation: int
    plan: OperationPlan
    role: str
    number: int | None
    expelled: tuple[str, ...] = ()


class Desired:
    """Sets what the nodes should have, and writes only what differs. The node of `relax up` reads the run's folder,
    the others read the bucket.
    """

    def __init__(self, folder: RunFolder, state: RunState, table: Table) -> None:
        self._folder, self._state, self._table = folder, state, table
        self._config: tuple[tuple[int, ...], Config] | None = None

    def config(self) -> Config:
        """Return the run's settings as they are now."""
        fingerprint = self._folder.config_fingerprint()
        if self._config is None or self._config[0] != fingerprint:
            self._config = fingerprint, self._folder.load_config()
        return self._config[1]

    def lacking(self, plan: OperationPlan, role: str) -> tuple[str, ...]:
        """Return a line for each actor that would lack GPUs on the node of `relax up`."""
        if plan.node != 0:
            return ()
        config = _with_replicas(self.config(), {role: plan.after})
        return lacking_gpus(config, Assignment.load(self._folder, config))

    def wanted(self, node: NodeView, role: str) -> int | None:
        """Return how many actors of a role a node should have now; None if no operation has set it on another node."""
        if node.number == 0:
            return self.replicas(role)
        record = self._table.call(fetch_run_record(self._state))
        return None if record is None else record.scaled.get(node.name, {}).get(role)

    def replicas(self, role: str) -> int | None:
        """Return the configured number of actors of a role; None if the run does not have the role."""
        config = self.config()
        return section_of(config, role).replicas if role in role_names(config) else None

    def apply(
        self, changes: Sequence[Change], engines: Sequence[Operation], on_probation: Sequence[str] = ()
    ) -> dict[int, str]:
        """Set numbers of actors, and the external engines, which belong to the node of `relax up`.

        Args:
            changes: numbers of actors, and actors that leave at once.
            engines: operations whose external engine should have an actor.
            on_probation: names of actors whose failures fail their operation, and do not end the run.

        Returns:
            Why changes cannot be made, by the number of their operation; the others are made.
        """
        own = [change for change in changes if change.plan.node == 0]
        problems = self._set_replicas(own)
        config = self.config()
        store, entries = config.store_path, {}
        for operation in engines:
            if operation.plan is not None:
                n = int(operation.plan.actors[0].rpartition(".")[2])
                key = ""  # the engine then refuses its client, and is removed
                with suppress(ConfigError):
                    key = read_key(store, operation.request.key_file)
                entries[n] = {"url": operation.request.url, "key": key}
        if entries:
            save_engines(self._folder.engines, entries)
        node = Assignment.load(self._folder, config)
        wanted = replace(node, engines=sorted(entries), expelled=_expelled(own), on_probation=sorted(on_probation))
        if wanted != node:
            wanted.save(self._folder)
        if not entries:
            save_engines(self._folder.engines, entries)
        self._publish([change for change in changes if change.plan.node != 0])
        return problems

    def _set_replicas(self, changes: Sequence[Change]) -> dict[int, str]:
        """Set numbers of actors in the run's folder; return why some cannot be set, by operation."""
        known = config = self.config()
        problems = {}
        for change in changes:
            if change.number is None:
                continue
            if change.role not in role_names(config):
                problems[change.operation] = f"the run has no role {change.role[:80]!r} any more"
            elif section_of(config, change.role).replicas != change.number:
                try:
                    config = _with_replicas(config, {change.role: change.number})
                except ConfigError as error:
                    problems[change.operation] = str(error)
        if config is not known:
            self._folder.replace_config(config)
        return problems

    def _publish(self, changes: Sequence[Change]) -> None:
        """Publish what the nodes that joined should have. The changes of one node share one entry of the bucket."""
        record = self._table.call(fetch_run_record(self._state)) if changes else None
        if record is None:
            return
        for name in dict.fromkeys(change.plan.node_name for change in changes):
            own = [change for change in changes if change.plan.node_name == name]
            numbers = {change.role: change.number for change in own if change.number is not None}
            scaled, expelled = record.scaled.get(name, {}), _expelled(own)
            if {**scaled, **numbers} != scaled or expelled != record.expelled.get(name, []):
                self._table.call(publish_scale(self._state, name, numbers, expelled))


def with_operations(node: Assignment, config: Config, record: RunRecord) -> Assignment:
    """Return what a node that joined should have after the operations on the run.

    Args:
        node: what the node was started with.
        config: settings of the run on this machine.
        record: the run as published.
    """
    here = [role for role, name in record.moved.items() if name == node.name and role in role_names(config)]
    for role in [role for role in node.roles if role in record.moved and role not in here]:
        node = node.without_role(role)
    for role in [role for role in here if role not in node.roles]:
        node = node.with_role(config, role)
    code = {name: Code(*copy) for name, copy in record.copies.items()}
    expelled = record.expelled.get(node.name, [])
    return replace(node.scaled(record.scaled.get(node.name, {})), expelled=expelled, moved=here, code=code)


def needs_restart(record: RunRecord, known: RunRecord, node: Assignment) -> bool:
    """Whether the process of a node that joined must start again: for other settings, or as `relax up` has started
    again, after which all actors import the files in place.
    """
    return _read_by(record, node) != _read_by(known, node) or (bool(node.code) and not record.copies)


def _read_by(record: RunRecord, node: Assignment) -> RunRecord:
    """Return what a node's process reads once: roles of other nodes may come and go."""
    own = {name: table for name, table in record.config.get("roles", {}).items() if name in node.roles}
    config = record.config | {"roles": own}
    return replace(record, config=config, scaled={}, expelled={}, consumers={}, moved={}, copies={})


def _expelled(changes: Sequence[Change]) -> list[str]:
    return sorted({name for change in changes for name in change.expelled})


def _with_replicas(config: Config, numbers: dict[str, int]) -> Config:
    body: dict[str, Any] = config.model_dump(mode="json")
    for role, number in numbers.items():
        section = body["roles"][role] if role in body["roles"] else body[built_in_spec(role).section]
        section["replicas"] = number
    return validate(body, "operation")
