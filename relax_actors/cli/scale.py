"""`relax scale`: more or fewer actors of a role, while the run is up."""

from __future__ import annotations

import time
from typing import Any

from relax_actors.config import Config, validate
from relax_actors.errors import ConfigError
from relax_actors.monitoring.connection import Connected, children_of, connected
from relax_actors.roles import role_names, section_of
from relax_actors.supervision.assignment import SINGLE, SPAN, Assignment
from relax_actors.supervision.streams import publish_scale

PATIENCE = 120.0


def scale(run: str, settings: list[str], node: str | None = None) -> dict[str, int]:
    """Have so many actors of some roles, given as `role=number`, and wait until it is so.

    Those that are too many finish what they have in hand first, for which they have the role's deadline.

    Args:
        run: its name or folder.
        settings: `role=number` each.
        node: number or name of the node whose actors are meant; the one of `relax up` if it has the roles, else the
            only one that has them.

    Raises:
        ConfigError: no such role or node, a number that it cannot have, or the run is not up.
    """
    with connected(run) as at:
        if not at.live:
            msg = f"run {at.config.run.name} is not up; set replicas in its TOML file, or `relax up` it first"
            raise ConfigError(msg)
        wanted = dict(_parse(at.config, setting) for setting in settings)
        number, name = _find(_nodes(at), wanted, node)
        if number == 0:
            body: dict[str, Any] = at.config.model_dump(mode="json")
            for role, count in wanted.items():
                section = body["roles"] if role in body["roles"] else body
                section[role]["replicas"] = count
            at.folder.replace_config(validate(body, "relax scale"))
        else:
            at.table.connection.call(publish_scale(at.state, name, wanted), 30)
        patience = PATIENCE + max(section_of(at.config, role).deadline for role in wanted)
        end = time.monotonic() + patience
        while (found := _ready(at, number, wanted)) != wanted:
            if time.monotonic() > end:
                msg = f"asked for {wanted}, there are {found} after {patience:g} s; see `relax tree {run}`"
                raise ConfigError(msg)
            time.sleep(0.2)
        return wanted


def _parse(config: Config, setting: str) -> tuple[str, int]:
    role, _, number = setting.partition("=")
    if role not in role_names(config) or not number.isdigit() or not 0 < int(number) < SPAN:
        names = ", ".join(role_names(config))
        msg = f"{setting!r} is no role=number; roles are {names}, and each has 1 to {SPAN - 1} actors"
        raise ConfigError(msg)
    if role in SINGLE:
        msg = f"{setting!r}: {role} owns state and has one actor"
        raise ConfigError(msg)
    return role, int(number)


def _nodes(at: Connected) -> dict[int, tuple[str, set[str]]]:
    """Name and roles of each node; that of `relax up` is there whether it has a lease or not."""
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


def _find(nodes: dict[int, tuple[str, set[str]]], wanted: dict[str, int], node: str | None) -> tuple[int, str]:
    """Number and name of the node whose actors are meant."""
    able = {number: name for number, (name, roles) in sorted(nodes.items()) if roles.issuperset(wanted)}
    if node is not None:
        able = {number: name for number, name in able.items() if node in (str(number), name)}
    elif 0 in able:
        return 0, able[0]
    if len(able) == 1:
        return able.popitem()
    there = "; ".join(f"{number} {name}: {' '.join(sorted(roles))}" for number, (name, roles) in sorted(nodes.items()))
    which = (
        f"there is no node {node!r} with {', '.join(wanted)}"
        if node is not None
        else f"{', '.join(wanted)}: on no node, or on several; say which by --node"
    )
    msg = f"{which}; nodes are {there}"
    raise ConfigError(msg)


def _ready(at: Connected, node: int, roles: dict[str, int]) -> dict[str, int]:
    """How many actors each of the roles has there; those that start or stop do not count as right."""
    children = children_of(at.table.connection.call(at.state.leases(), 10).get(f"node.{node}", {}))
    found = dict.fromkeys(roles, 0)
    for name, child in children.items():
        role = name.rpartition(".")[0]
        if role in found:
            found[role] += 1 if isinstance(child, dict) and child.get("phase") == "ready" else len(children) + 1
    return found
