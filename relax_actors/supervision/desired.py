"""What operations set for the nodes of a run: numbers of actors, external engines, and actors that leave at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from broker.leases import RunState
from broker.table import Table
from relax_actors.config import Config, validate
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OperationPlan
from relax_actors.operations.engines import read_key, save_engines
from relax_actors.operations.states import Operation
from relax_actors.roles import section_of
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.assignment import Assignment
from relax_actors.supervision.gpu_leases import lacking_gpus
from relax_actors.supervision.streams import fetch_run_record, publish_scale


@dataclass(frozen=True, slots=True)
class Change:
    """Number of actors that a role should have on the node of a plan.

    Attributes:
        plan: of an operation.
        role: name of the role.
        number: actors to have; None to leave it.
        expelled: names of actors that leave at once, instead of finishing their rows.
    """

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

    def apply(self, changes: Sequence[Change], engines: Sequence[Operation]) -> None:
        """Set numbers of actors, and the external engines, which belong to the node of `relax up`."""
        own = [change for change in changes if change.plan.node == 0]
        config = self.config()
        numbers = {
            c.role: c.number for c in own if c.number is not None and section_of(config, c.role).replicas != c.number
        }
        if numbers:
            self._folder.replace_config(_with_replicas(config, numbers))
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
        wanted = replace(node, engines=sorted(entries), expelled=list(chain.from_iterable(c.expelled for c in own)))
        if wanted != node:
            wanted.save(self._folder)
        if not entries:
            save_engines(self._folder.engines, entries)
        for change in changes:
            if change.plan.node != 0 and change.number is not None:
                self._publish(change, change.number)

    def _publish(self, change: Change, number: int) -> None:
        name = change.plan.node_name
        record = self._table.call(fetch_run_record(self._state))
        if record is None:
            return
        known = record.scaled.get(name, {}).get(change.role), tuple(record.expelled.get(name, ()))
        if known != (number, change.expelled):
            self._table.call(publish_scale(self._state, name, {change.role: number}, change.expelled))


def _with_replicas(config: Config, numbers: dict[str, int]) -> Config:
    body: dict[str, Any] = config.model_dump(mode="json")
    for role, number in numbers.items():
        section = body["roles"] if role in body["roles"] else body
        section[role]["replicas"] = number
    return validate(body, "operation")
