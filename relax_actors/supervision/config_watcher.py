"""Watcher of a node's saved configuration, which operations change while the run is up."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress

import structlog

from relax_actors.config import Config
from relax_actors.errors import RelaxError
from relax_actors.runtime.run_folder import RunFolder
from relax_actors.supervision.assignment import Assignment
from relax_actors.supervision.gpu_leases import lacking_gpus
from relax_actors.supervision.pools import SERVER, make_pool, specs_of
from relax_actors.supervision.processes import ProcessTree
from relax_actors.supervision.reporter import split_child_id
from relax_actors.supervision.spec import ChildSpec

log = structlog.get_logger()


class ConfigWatcher:
    """Keeps the actors of a node at what the saved configuration and assignment say; call it regularly.

    Roles come and go, actors come and go, and actors that are to run other code are restarted. An inference server
    stops after its actor, which first finishes its current rows. Numbers for which the node lacks GPUs are not
    followed.

    Args:
        folder: the folder of the node.
        fingerprint: `folder.config_fingerprint()` as of before the actors' configuration was loaded.
        tree: runs the actors.
        config: that configuration.
        node: the node's assignment.

    Attributes:
        config: the configuration with which actors start now.
        node: the assignment that they start with.
    """

    def __init__(
        self, folder: RunFolder, fingerprint: tuple[int, ...], tree: ProcessTree, config: Config, node: Assignment
    ) -> None:
        self.config, self.node = config, node
        self._folder, self._tree = folder, tree
        self._fingerprint = fingerprint
        self._leaving = False
        self._expelled: list[str] = []
        self._servers: list[ChildSpec] | None = None
        """Servers to keep, as long as surplus servers exist."""

    def __call__(self) -> None:
        """Apply a change of the configuration, if there is one."""
        if self._servers is not None:
            self._resize_servers(self._servers)
        for child in self._expelled:  # a second after the request to stop, so that the death is an expected one
            self._tree.kill(child, signal.SIGKILL)
        self._expelled = []
        if self._leaving:
            return
        with suppress(OSError, RelaxError):
            fingerprint = self._folder.config_fingerprint()
            if fingerprint != self._fingerprint:
                config = self._folder.load_config()
                node = Assignment.load(self._folder, config)
                self._fingerprint = fingerprint
                if problems := lacking_gpus(config, node):
                    log.warning("not_scaled", problems=problems)
                    return
                self._follow(config, node)

    def _follow(self, config: Config, node: Assignment) -> None:
        """Set the actors, and restart those that are to run other code."""
        changed = [actor for actor, code in node.code.items() if code.since and code != self.node.code.get(actor)]
        names = {actor for actor in changed if actor.rpartition(".")[0] in self._tree.pools}
        self.config, self.node = config, node
        for role in {name.rpartition(".")[0] for name in names}:
            # An actor that leaves and is wanted again is started again when it has finished its rows.
            self._tree.resize(role, [spec for spec in specs_of(config, node, role) if spec.id not in names])
        for role in list(self._tree.pools):
            if role == SERVER:
                self._resize_servers(specs_of(config, node, role))
            else:
                self._tree.resize(role, specs_of(config, node, role) if role in node.roles else [])
        for role in [role for role in node.roles if role not in self._tree.pools]:
            pool = make_pool(config, [], random.Random(os.getpid()))  # noqa: S311 jitter
            self._tree.resize(role, specs_of(config, node, role), pool)
        self._expelled = node.expelled

    def leave(self) -> None:
        """Stop all actors after their current rows, and ignore later changes."""
        self._leaving = True
        for role in list(self._tree.pools):
            if role == SERVER:
                self._resize_servers([])
            else:
                self._tree.resize(role, [])

    def _resize_servers(self, wanted: list[ChildSpec]) -> None:
        """Keep these servers, and surplus ones whose actors still exist."""
        ids, actors = {spec.id for spec in wanted}, self._tree.pools["rollout"].children
        servers = list(self._tree.pools[SERVER].children.values())
        surplus = [state.spec for state in servers if state.spec.id not in ids]
        used = [spec for spec in surplus if f"rollout.{split_child_id(spec.id)[1]}" in actors]
        self._servers = wanted if surplus else None
        self._tree.resize(SERVER, [*wanted, *used])
