"""Operations that add a role to a live run or remove one: what they set, and what they give back.

A role that is added is in the run's configuration, has consumers, credentials, and a pool on the node of `relax up`.
What the operations want follows from their log, and is set again as long as it differs, so that any process may die
meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats.errors

from broker.errors import BrokerError
from broker.leases import RunState
from broker.permissions import follow_names
from broker.streams import remove_consumer
from broker.table import Table
from relax_actors.config import Config, validate
from relax_actors.errors import ConfigError
from relax_actors.messages.operations import OperationPlan, OperationRequest
from relax_actors.operations import History, Operation, State
from relax_actors.operations.plan import NodeView
from relax_actors.roles import replicas, role_names
from relax_actors.roles.fitting import check_addition, check_removal
from relax_actors.roles.gpus import needs_of_roles
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.runtime.user_code import code_files, forget_modules, keep_code
from relax_actors.supervision.assignment import Assignment
from relax_actors.supervision.pools import secrets_of
from relax_actors.supervision.sandbox import check_sandbox

KINDS = ("add_role", "remove_role")
CLEANUP_SECONDS = 2.0
"""Seconds between two looks for what removed roles have left."""


class RoleChanges:
    """Adds roles to a run and removes them. All methods run in the thread of `Operations`.

    Args:
        table: the run's table, of the operator.
        state: its bucket.
        folder: its folder.
        open_run: makes streams, consumers and credentials of the roles of a configuration, and publishes it.
        had_ended: whether an operation had ended when the root started; the configuration of `relax up` counts more.
    """

    def __init__(
        self,
        table: Table,
        state: RunState,
        folder: RunFolder,
        open_run: Callable[[Config], None],
        had_ended: Callable[[int], bool],
    ) -> None:
        self._table, self._state, self._folder = table, state, folder
        self._open, self._had_ended = open_run, had_ended
        self._left: set[str] | None = None
        """Roles that are not in the run any more, and may have left consumers; None before the first look."""
        self._cleaned_at = float("-inf")
        self.waiting: dict[int, str] = {}
        """Why operations could not be carried out yet, by number."""

    def plan(self, request: OperationRequest, config: Config, nodes: Mapping[int, NodeView]) -> OperationPlan:
        """Check a request, and return what it changes on the node of `relax up`.

        Raises:
            ConfigError: the role cannot be added or removed.
        """
        node = nodes[0]
        if request.kind == "remove_role":
            return self._plan_removal(request.role, config, nodes)
        if request.role in role_names(config):
            msg = f"the run has a role {request.role} already; `relax roles replace` gives it other code"
            raise ConfigError(msg)
        self._forget_code(config, request)
        after = with_role(config, request.role, json.loads(request.settings))
        check_addition(config, after, request.role)
        check_machine(after, request.role)
        count = replicas(after, request.role)
        return OperationPlan(node.number, node.name, 0, count, [f"{request.role}.{n}" for n in range(count)])

    def _plan_removal(self, role: str, config: Config, nodes: Mapping[int, NodeView]) -> OperationPlan:
        node = nodes[0]
        if role not in config.roles:
            own = ", ".join(config.roles) or "none"
            msg = f"{role} is no role of [roles] in this run; roles that can be removed are {own}"
            raise ConfigError(msg)
        check_removal(config, without_role(config, role), role)
        if others := [f"node {n} {view.name}" for n, view in sorted(nodes.items()) if n and role in view.roles]:
            msg = f"{', '.join(others)} has actors of {role}; stop that `relax node` before you remove the role"
            raise ConfigError(msg)
        return OperationPlan(
            node.number, node.name, len(node.actors(role)), 0, [f"{role}.{n}" for n in node.actors(role)]
        )

    def _forget_code(self, config: Config, request: OperationRequest) -> None:
        """Have the modules of the role read again: an earlier attempt may have imported them unedited."""
        path = Path(self._folder.import_path)
        after = with_role(config, request.role, json.loads(request.settings))

        def imported(settings: Config, role: str) -> set[Path]:
            return set(code_files(settings, role, path, whole_packages=False).values())

        used = {file for name in role_names(config) for file in imported(config, name)}
        forget_modules(imported(after, request.role) - used)

    def apply(self, history: History, away: Collection[str] = ()) -> dict[int, str]:
        """Set the roles that the operations want; return why some cannot be set, by number of the operation.

        Args:
            history: all operations.
            away: roles that operations have moved to other nodes.
        """
        last = {
            o.request.role: o for o in history.operations.values() if o.request.kind in KINDS and o.plan is not None
        }
        if not last:
            return {}
        config, problems = self._folder.load_config(), {}
        if self._left is None:
            self._left = {role for role in last if role not in config.roles}
        for role, operation in last.items():
            # The configuration of `relax up` counts more than what had ended when the root started.
            if not self._had_ended(operation.id):
                try:
                    config = self._set(config, role, operation, is_away=role in away)
                    self.waiting.pop(operation.id, None)
                except ConfigError as error:
                    problems[operation.id] = str(error)
                except BrokerError as error:
                    # Such as new credentials that an external server has not read; the other operations go on.
                    self.waiting[operation.id] = f"{error}; an external server must reload its configuration"
                except (nats.errors.Error, OSError):
                    raise  # the next call tries again
                except Exception as error:  # noqa: BLE001 of the class of a user; the other operations go on
                    problems[operation.id] = f"{type(error).__name__}: {error}"
        return problems

    def _set(self, config: Config, role: str, operation: Operation, *, is_away: bool) -> Config:
        """Add or remove a role, unless that is done; return the settings with the change.

        Raises:
            ConfigError: the settings do not fit any more.
        """
        node, is_wanted = Assignment.load(self._folder, config), wants_role(operation, config)
        if is_wanted == (role in config.roles) == (role in node.roles or (is_away and is_wanted)):
            return config
        if is_wanted:
            after = config
            if role not in config.roles:
                after = with_role(config, role, json.loads(operation.request.settings))
                # Any process that may request operations can write their cells, and so pass by the check of the plan.
                check_addition(config, after, role)
                check_machine(after, role)
            kept = keep_code(after.store_path, code_files(after, role, Path(self._folder.import_path)))
            self._open(after)
            node = node if role in node.roles else node.with_role(after, role)
            trial = () if operation.plan is None or operation.is_over else operation.plan.actors
            on_probation = sorted({*node.on_probation, *trial})
            node = replace(node, kept={**node.kept, role: kept}, on_probation=on_probation)
        else:
            # Consumers and credentials go when the actors have ended; see `clean_up`.
            after = config
            if role in config.roles:
                after = without_role(config, role)
                check_removal(config, after, role)
            node = node.without_role(role)
        left = set(self._left or ())
        self._left = left - {role} if is_wanted else left | {role}
        self._folder.replace_config(after)
        node.save(self._folder)
        return after

    @property
    def has_left(self) -> bool:
        """Whether consumers and credentials of removed roles may be left."""
        return bool(self._left)

    def clean_up(self, children: Mapping[str, Any], leases: Mapping[str, Any]) -> None:
        """Remove consumers and credentials of roles that are gone, when their actors have ended.

        Args:
            children: children of the node of `relax up`, by name.
            leases: leases of the actors, by name.
        """
        if not self._left or time.monotonic() - self._cleaned_at < CLEANUP_SECONDS:
            return
        self._cleaned_at = time.monotonic()
        alive = {name.rpartition(".")[0] for name in (*children, *leases)}
        for role in self._left - alive:
            for name in (role, *follow_names(role)):
                self._table.call(remove_consumer(self._table.connection, self._table.subjects.table_stream, name))
        if gone := self._left - alive:
            self._open(self._folder.load_config())
            self._left -= gone


def check_machine(config: Config, role: str) -> None:
    """Check that the node of `relax up` can run a role that is added while the run is up.

    Raises:
        ConfigError: it needs secrets, GPUs or a sandbox that it cannot get.
    """
    remedy = "put the section in the TOML file, stop the run and start it again"
    if secrets := sorted(secrets_of(config, [role])):
        # Roles that may request operations, such as the gateway, must not get at secrets by a role that they add.
        msg = f"roles.{role}.secrets = {secrets}: a role that is added while the run is up gets no secrets; {remedy}"
        raise ConfigError(msg)
    if needs_of_roles(config, [role]):
        msg = (
            f"roles.{role} computes on GPUs, which are given out at the start of a run; set its device to "
            f'"cpu", or {remedy}'
        )
        raise ConfigError(msg)
    check_sandbox(config, [role])


def wants_role(operation: Operation, config: Config) -> bool:
    """Whether a role should be in a run, according to the last operation that adds or removes it."""
    if operation.request.kind == "add_role":
        return operation.state not in (State.FAILED, State.CANCELLED)
    # A removal that failed leaves the role if it is still there; the settings of a removed role are not known.
    return operation.state is State.FAILED and operation.request.role in config.roles


def with_role(config: Config, role: str, settings: dict[str, Any]) -> Config:
    """Return the settings of a run with a further role.

    Raises:
        ConfigError: the settings of the role are wrong.
    """
    body = config.model_dump(mode="json")
    return validate({**body, "roles": {**body["roles"], role: settings}}, f"settings of role {role}")


def without_role(config: Config, role: str) -> Config:
    """Return the settings of a run without a role.

    Raises:
        ConfigError: another section needs the role.
    """
    body = config.model_dump(mode="json")
    rest = {name: table for name, table in body["roles"].items() if name != role}
    return validate({**body, "roles": rest}, f"settings without role {role}")
