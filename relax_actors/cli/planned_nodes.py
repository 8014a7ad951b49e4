"""Nodes of a run, checked and placed in advance, for commands that describe jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from relax_actors.printable import printable_lines

if TYPE_CHECKING:
    from relax_actors.checks.cluster import NodeShare
    from relax_actors.config import Config


@dataclass(frozen=True, slots=True)
class PlannedNodes:
    """Nodes of a run.

    Attributes:
        config: the configuration.
        shares: what each node does, by its number.
        gpus: GPUs of each node.
    """

    config: Config
    shares: Sequence[NodeShare]
    gpus: int


def plan(path: Path, overrides: Sequence[str], nodes: str, roles: Sequence[str]) -> PlannedNodes:
    """Check a configuration and place it on nodes, such as "2x8".

    `roles` are additional actors on every node but the first, as role=number.

    Raises:
        ConfigError: the configuration cannot work or does not fit, a node has no actor, or the run has no such role.
    """
    from relax_actors.checks import examine
    from relax_actors.checks.cluster import node_shares, place_on_nodes, placement_lines
    from relax_actors.config import load_config
    from relax_actors.config.load import set_by
    from relax_actors.data.epochs import with_epochs
    from relax_actors.devices.cluster import simulated_nodes
    from relax_actors.errors import ConfigError

    cluster = simulated_nodes(nodes)
    config = with_epochs(load_config(path, list(overrides)))
    more = _more(config, roles, has_gpus=bool(cluster[0].gpus))
    findings = examine(config, spelled=set_by(path, list(overrides)), inventory=cluster[0], nodes=cluster)
    if findings.errors or findings.facts is None:
        raise ConfigError(*findings.errors)
    placement = place_on_nodes(config, cluster, findings.facts, more)
    for line in (*findings.notes, *placement_lines(config, cluster, placement)):
        typer.echo(printable_lines(line), err=True)
    shares = node_shares(config, placement)
    if idle := sorted(set(range(len(cluster))) - {share.node for share in shares}):
        msg = f"node {idle[0]} has no actor; take fewer nodes, or say what runs there, such as --role rollout=1"
        raise ConfigError(msg)
    return PlannedNodes(config, shares, len(cluster[0].gpus))


def _more(config: Config, roles: Sequence[str], *, has_gpus: bool) -> dict[str, int]:
    """Return the number of additional actors of each role.

    Raises:
        ConfigError: a role is named twice, the run has no such role, or its actors cannot be anywhere.
    """
    from relax_actors.errors import ConfigError
    from relax_actors.roles import make_role, role_names
    from relax_actors.roles.gpus import needs_of_roles
    from relax_actors.runtime import StatefulRole
    from relax_actors.supervision.assignment import split_wanted

    more: dict[str, int] = {}
    for role, count in map(split_wanted, roles):
        if role not in role_names(config):
            msg = f"--role: the run has no role {role}; its roles are {', '.join(role_names(config))}"
        elif role in more:
            msg = f"--role {role} is given twice; give one number"
        elif isinstance(make_role(config, role), StatefulRole):
            msg = f"--role {role}: a run has one actor of it, which `relax up` starts; leave it out"
        elif has_gpus and needs_of_roles(config, [role]):
            msg = f"--role {role}: the placement gives GPUs to its actors; set its replicas in the configuration"
        else:
            more[role] = count
            continue
        raise ConfigError(msg)
    return more
