"""The supervision tree of a run as its supervisors report it in their leases."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.tree import Tree

from relax_actors.config import Config
from relax_actors.monitoring.connection import Connected
from relax_actors.monitoring.leases import activity, age, children_of, number
from relax_actors.roles import replicas, role_names
from relax_actors.supervision.absence import needed_roles, present_roles

MAX_FORGED = 20
"""Most entries that are shown although they are no leases."""


def supervision_tree(at: Connected) -> Tree:
    """Build the tree of broker, nodes, pools and actors from the leases of a run."""
    leases = at.table.connection.call(at.state.leases(), 10)
    nodes = {key[5:]: leases.pop(key) for key in sorted(leases, key=_order) if key.startswith("node.")}
    roots = {key[5:]: children_of(leases.pop(key)) for key in list(leases) if key.startswith("root.")}
    forged = at.table.connection.call(at.state.forged_leases(), 10)
    root = Tree(f"run {at.config.run.name}" + ("" if at.live else " (not up)"))
    if at.config.broker.url is None:
        root.add(f"broker, embedded {_state(roots.get('0', {}).get('broker') if at.live else None)}")
    else:
        root.add(escape(f"broker {at.table.connection.address.url}"))
    for n in nodes or ["0"]:
        state = roots.get(n, {}).get("node") if at.live else None
        _add_actors(_add_node(root, n, nodes.get(n, {}), state), at.config, nodes.get(n, {}), leases)
    for name, why in sorted(forged.items())[:MAX_FORGED]:
        root.add(f"[red]{escape(f'entry lease.{name[:80]} is no lease and is ignored: {why}')}[/]")
    if nodes:
        present = present_roles(nodes.values())
        for role, what in needed_roles(at.config).items():
            if role not in present:
                root.add(f"[red]{escape(f'{role} has no actor on any node: {what}')}[/]")
    return root


def _add_node(root: Tree, n: str, node: dict[str, Any], state: Any) -> Tree:
    name = ("node" if n == "0" else f"node {n}") + (f" {str(node['name'])[:80]}" if "name" in node else "")
    lease = escape(f", lease for {age(node)}") if node else ", [red]no lease[/]"
    branch = root.add(f"{escape(name)} {_state(state)}{lease}")
    if not node or node.get("zygote") is not None:
        branch.add(f"zygote {_state(node.get('zygote'))}")
    return branch


def _add_actors(branch: Tree, config: Config, node: dict[str, Any], leases: dict[str, Any]) -> None:
    """Add the actors that a node reports, or without its lease those that it should have."""
    states = children_of(node)
    names = states if node else [f"{role}.{n}" for role in role_names(config) for n in range(replicas(config, role))]
    pools: dict[str, Tree] = {}
    for child in names:
        role = child.rpartition(".")[0]
        if role not in pools:
            pools[role] = branch.add(escape(f"{role[:80]}, one_for_one"))
        pools[role].add(f"{escape(child[:90])} {_state(states.get(child))}{_incarnation(leases.get(child))}")


def _order(name: str) -> tuple[str, int]:
    role, _, n = name.rpartition(".")
    return role, int(n) if n.isdigit() else -1


def _state(state: Any) -> str:
    if not isinstance(state, dict):
        return "[red]unknown[/]"
    restarts = int(number(state.get("restarts"), 0))
    pid = f", pid {str(state['pid'])[:20]}" if state.get("pid") else ""
    return escape(f"{str(state.get('phase'))[:20]} for {age(state)}, {restarts} restarts{pid}")


def _incarnation(lease: dict[str, Any] | None) -> str:
    if lease is None:
        return ""
    incarnation = str(lease.get("incarnation"))[:20]
    return escape(f", incarnation {incarnation}, up {age(lease)}: {activity(lease)}")
