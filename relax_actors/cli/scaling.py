"""Changes of the number of actors of a role in a live run."""

from __future__ import annotations

import time
from typing import Any

from relax_actors.config import Config, validate
from relax_actors.errors import ConfigError
from relax_actors.monitoring.access import Access
from relax_actors.monitoring.connection import Connected, connected
from relax_actors.monitoring.leases import children_of
from relax_actors.roles import role_names, section_of, spec_of
from relax_actors.supervision.assignment import SPAN, Assignment
from relax_actors.supervision.gpu_leases import lacking_gpus
from relax_actors.supervision.streams import publish_scale

READY_SECONDS = 120.0
"""Time for new actors to start, besides the deadline in which surplus actors finish their rows."""


def scale_roles(run: str, settings: list[str], node: str | None = None, access: Access | None = None) -> dict[str, int]:
    """Set the number of actors of roles, and wait until these actors are ready.

    Surplus actors finish their current rows first; they have their role's deadline to do so.

    Args:
        run: name or folder of the run.
        settings: `role=number` each.
        node: number or name of the node to scale. Default: the node of `relax up` if it runs the roles, else the only
            node that runs them.
        access: options for the run's broker.

    Returns:
        The number of actors of each role given.

    Raises:
        ConfigError: an unknown role or node, a number that the role cannot have, a run that is not up, or actors that
            are not ready in time.
    """
    with connected(run, access) as at:
        if not at.live:
            msg = f"run {at.config.run.name} is not up; set replicas in its TOML file, or start it with `relax up`"
            raise ConfigError(msg)
        wanted = dict(_parse(at.config, setting) for setting in settings)
        number, name = _find_node(_nodes(at), wanted, node)
        if number == 0:
            body: dict[str, Any] = at.config.model_dump(mode="json")
            for role, count in wanted.items():
                section = body["roles"] if role in body["roles"] else body
                section[role]["replicas"] = count
            changed = validate(body, "relax scale")
            if problems := lacking_gpus(changed, Assignment.load(at.folder, changed)):
                raise ConfigError("\n".join(problems))
            at.folder.replace_config(changed)
        else:
            at.table.connection.call(publish_scale(at.state, name, wanted), 30)
        timeout = READY_SECONDS + max(section_of(at.config, role).deadline for role in wanted)
        end = time.monotonic() + timeout
        while (found := _ready(at, number, wanted)) != wanted:
            if time.monotonic() > end:
                msg = f"{found} actors are ready after {timeout:g} s, not {wanted}; see `relax tree {run}`"
                raise ConfigError(msg)
            time.sleep(0.2)
        return wanted


def _parse(config: Config, setting: str) -> tuple[str, int]:
    role, _, number = setting.partition("=")
    if role not in role_names(config) or not number.isdigit() or not 0 < int(number) < SPAN:
        names = ", ".join(role_names(config))
        msg = f"{setting!r} is no role=number; roles are {names}, with 1 to {SPAN - 1} actors each"
        raise ConfigError(msg)
    if spec_of(config, role).single:
        msg = f"{setting!r}: {role} owns state and has exactly one actor; scale another role"
        raise ConfigError(msg)
    return role, int(number)


def _nodes(at: Connected) -> dict[int, tuple[str, set[str]]]:
    """Return name and roles of each node by number; always with node 0, that of `relax up`."""
    found: dict[int, tuple[str, set[str]]] = {}
    for key, lease in at.table.connection.call(at.state.leases(), 10).items():
        kind, _, number = key.partition(".")
        if kind == "node" and number.isdigit():
            found[int(number)] = (
                str(lease.get("name", ""))[:200],
                {child.rpartition(".")[0] for child in children_of(lease)},
            )
    own = Assignment.load(at.folder, at.config)
    return {**found, 0: (own.name, set(own.roles))}


def _find_node(nodes: dict[int, tuple[str, set[str]]], wanted: dict[str, int], node: str | None) -> tuple[int, str]:
    """Return number and name of the node to scale."""
    candidates = {number: name for number, (name, roles) in sorted(nodes.items()) if roles.issuperset(wanted)}
    if node is not None:
        candidates = {number: name for number, name in candidates.items() if node in (str(number), name)}
    elif 0 in candidates:
        return 0, candidates[0]
    if len(candidates) == 1:
        return candidates.popitem()
    known = "; ".join(f"{number} {name}: {' '.join(sorted(roles))}" for number, (name, roles) in sorted(nodes.items()))
    which = (
        f"no node {node!r} runs {', '.join(wanted)}"
        if node is not None
        else f"{', '.join(wanted)}: on no node, or on several; choose one with --node"
    )
    msg = f"{which}; nodes are {known}"
    raise ConfigError(msg)


def _ready(at: Connected, node: int, roles: dict[str, int]) -> dict[str, int]:
    """Count the ready actors of each role on a node.

    An actor that starts or stops adds more than the total, so that the count differs from any wanted number.
    """
    children = children_of(at.table.connection.call(at.state.leases(), 10).get(f"node.{node}", {}))
    found = dict.fromkeys(roles, 0)
    for name, child in children.items():
        role = name.rpartition(".")[0]
        if role in found:
            found[role] += 1 if isinstance(child, dict) and child.get("phase") == "ready" else len(children) + 1
    return found
