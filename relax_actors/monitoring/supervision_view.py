"""The supervision tree of a run as its supervisors report it in their leases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text
from rich.tree import Tree

from relax_actors.counted import counted
from relax_actors.devices.placement import shown
from relax_actors.monitoring.connection import Connected
from relax_actors.monitoring.leases import activity, age, children_of, code_of, number
from relax_actors.printable import printable

if TYPE_CHECKING:
    from relax_actors.config import Config

MAX_FORGED = 20
"""Most entries that are shown although they are no leases."""

MAX_GPUS = 64
"""Most GPUs of an actor that are shown."""


def supervision_tree(at: Connected) -> Tree:
    """Build the tree of broker, nodes, pools and actors from the leases of a run."""
    leases = at.table.connection.call(at.state.leases(), 10)
    nodes = {key[5:]: leases.pop(key) for key in sorted(leases, key=_order) if key.startswith("node.")}
    roots = {key[5:]: children_of(leases.pop(key)) for key in list(leases) if key.startswith("root.")}
    forged = at.table.connection.call(at.state.forged_leases(), 10)
    root = Tree(f"run {at.settings.run.name}" + ("" if at.live else " (not up)"))
    if at.settings.broker.url is None:
        root.add(_with_state("broker, embedded", roots.get("0", {}).get("broker") if at.live else None))
    else:
        root.add(printable(f"broker {at.table.connection.address.url}"))
    if at.live and (recorder := roots.get("0", {}).get("recorder")) is not None:
        root.add(_with_state("recorder", recorder))
    for n in nodes or ["0"]:
        state = roots.get(n, {}).get("node") if at.live else None
        _add_actors(_add_node(root, n, nodes.get(n, {}), state), at, nodes.get(n, {}), leases)
    for name, why in sorted(forged.items())[:MAX_FORGED]:
        root.add(Text(printable(f"entry lease.{name[:80]} is no lease and is ignored: {why}"), "red"))
    if nodes:
        # Imported for runs that have actors: it imports the classes of all roles.
        from relax_actors.supervision.absence import needed_roles, present_roles  # noqa: PLC0415

        present = present_roles(nodes.values())
        for role, what in needed_roles(at.config).items():
            if role not in present:
                root.add(Text(printable(f"{role} has no actor on any node: {what}"), "red"))
    return root


def _add_node(root: Tree, n: str, node: dict[str, Any], state: Any) -> Tree:
    name = ("node" if n == "0" else f"node {n}") + (f" {str(node['name'])[:80]}" if "name" in node else "")
    lease = Text(f", lease for {age(node)}") if node else Text.assemble(", ", ("no lease", "red"))
    spot = Text(", spot" if node.get("spot") is True else "")
    branch = root.add(_with_state(name, state).append_text(spot).append_text(lease))
    if not node or node.get("zygote") is not None:
        branch.add(_with_state("zygote", node.get("zygote")))
    return branch


def _add_actors(branch: Tree, at: Connected, node: dict[str, Any], leases: dict[str, Any]) -> None:
    """Add the actors that a node reports, or without its lease those that it should have if the run is up."""
    states = children_of(node)
    names = states if node or not at.live else _expected(at.config)
    pools: dict[str, Tree] = {}
    for child in names:
        role = child.rpartition(".")[0]
        if role not in pools:
            pools[role] = branch.add(printable(f"{role[:80]}, one_for_one"))
        state = _with_state(child[:90], states.get(child)).append(_gpus(node, child))
        pools[role].add(state.append(_incarnation(leases.get(child))))


def _expected(config: Config) -> list[str]:
    from relax_actors.roles import replicas, roles_at_start  # noqa: PLC0415 as above

    return [f"{role}.{n}" for role in roles_at_start(config) for n in range(replicas(config, role))]


def _order(name: str) -> tuple[str, int]:
    role, _, n = name.rpartition(".")
    return role, int(n) if n.isdigit() else -1


def _with_state(name: str, state: Any) -> Text:
    """Return the name of a process, and its state as its supervisor reports it."""
    if not isinstance(state, dict):
        return Text.assemble(printable(name), " ", ("unknown", "red"))
    restarts = int(number(state.get("restarts"), 0))
    pid = f", pid {str(state['pid'])[:20]}" if state.get("pid") else ""
    phase = str(state.get("phase"))[:20].replace("_", " ")
    return Text(printable(f"{name} {phase} for {age(state)}, {counted(restarts, 'restart')}{pid}"))


def _gpus(node: dict[str, Any], child: str) -> str:
    """Name the GPUs that a node has leased to an actor."""
    leased = node.get("gpus")
    numbers = leased.get(child) if isinstance(leased, dict) else None
    if not isinstance(numbers, list) or not all(isinstance(n, int) for n in numbers[:MAX_GPUS]):
        return ""
    return f", {shown(tuple(numbers[:MAX_GPUS]))}" if numbers else ""


def _incarnation(lease: dict[str, Any] | None) -> str:
    if lease is None:
        return ""
    incarnation = str(lease.get("incarnation"))[:20]
    code = f", code {version}" if (version := code_of(lease)) else ""
    return printable(f", incarnation {incarnation}{code}, up {age(lease)}: {activity(lease)}")
