"""The supervision tree of a run as its supervisors report it in their leases."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.text import Text
from rich.tree import Tree

from relax_actors.counted import counted
from relax_actors.devices.machine import MachineUse
from relax_actors.devices.placement import shown
from relax_actors.monitoring.connection import Connected
from relax_actors.monitoring.leases import activity, children_of, code_of, number
from relax_actors.printable import printable

if TYPE_CHECKING:
    from relax_actors.config import Config

MAX_FORGED = 20
"""Most entries that are shown although they are no leases."""

MAX_GPUS = 64
"""Most GPUs of an actor that are shown."""


@dataclass(frozen=True, slots=True)
class Process:
    """A supervised process as reported; unknown fields are None.

    Attributes:
        name: its name, such as `rollout.0`.
        phase: `ready`, `starting`, `backing_off`, `down` and the like.
        seconds: for how long it has been in this phase.
        restarts: restarts that its present supervisor has counted.
        pid: its process.
        gpus: numbers of its GPUs on the node.
        incarnation: number of its incarnation.
        code: beginning of the version of the user's code that it runs; empty if it runs none.
        up_seconds: age of its lease.
        activity: rows that it handles or what it waits for, and for how long; empty without a lease.
    """

    name: str
    phase: str | None = None
    seconds: float | None = None
    restarts: int = 0
    pid: int | None = None
    gpus: tuple[int, ...] = ()
    incarnation: int | None = None
    code: str = ""
    up_seconds: float | None = None
    activity: str = ""

    @classmethod
    def of(cls, name: str, state: Any, gpus: Any = None, lease: Mapping[str, Any] | None = None) -> Process:
        """Return a process from its supervisor's lease and, if any, its own.

        Any client of the broker can write a lease, so no field is trusted.
        """
        state, lease = state if isinstance(state, dict) else {}, dict(lease or {})
        numbers = gpus[:MAX_GPUS] if isinstance(gpus, list) else []
        return cls(
            name[:90],
            str(state.get("phase"))[:20].replace("_", " ") if state else None,
            _seconds(state) if state else None,
            int(number(state.get("restarts"), 0)),
            _whole(state.get("pid")),
            tuple(numbers) if all(isinstance(n, int) for n in numbers) else (),
            _whole(lease.get("incarnation")),
            code_of(lease),
            _seconds(lease) if lease else None,
            activity(lease) if lease else "",
        )


@dataclass(frozen=True, slots=True)
class Node:
    """A node: its supervisor, what it shares among actors, and its actors.

    Attributes:
        name: `node`, or `node <n> <name>` of a node that joined.
        supervisor: its process.
        lease_seconds: age of its lease; None without one: it is down, or cut off from the broker.
        spot: whether it may vanish.
        zygote: process that actors are forked from; None if the node reports none.
        actors: its actors, or those that it should have if it is not there.
        machine: load, memory, disk and GPUs of its machine; None if the node has not reported them.
    """

    name: str
    supervisor: Process
    lease_seconds: float | None
    spot: bool
    zygote: Process | None
    actors: list[Process]
    machine: MachineUse | None = None


@dataclass(frozen=True, slots=True)
class Supervision:
    """All processes of a run.

    Attributes:
        run: name of the run.
        live: whether it is up.
        broker: the embedded broker; None if it is elsewhere.
        broker_url: address of a broker that the run does not start; empty for an embedded one.
        recorder: process that keeps rows for people; None if there is none.
        nodes: nodes, that of `relax up` first.
        ignored: entries under the keys of leases that are no leases, with the reason.
        missing: roles without an actor on any node, with what they are needed for.
    """

    run: str
    live: bool
    broker: Process | None
    broker_url: str
    recorder: Process | None
    nodes: list[Node]
    ignored: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def read_supervision(at: Connected) -> Supervision:
    """Read the leases of a run."""
    leases = at.table.connection.call(at.state.leases(), 10)
    nodes = {key[5:]: leases.pop(key) for key in sorted(leases, key=_order) if key.startswith("node.")}
    roots = {key[5:]: children_of(leases.pop(key)) for key in list(leases) if key.startswith("root.")}
    forged = at.table.connection.call(at.state.forged_leases(), 10)
    first, is_embedded, missing = roots.get("0", {}) if at.live else {}, at.settings.broker.url is None, {}
    if nodes:
        # Imported for runs that have actors: it imports the classes of all roles.
        from relax_actors.supervision.absence import needed_roles, present_roles  # noqa: PLC0415

        present = present_roles(nodes.values())
        missing = {role: what for role, what in needed_roles(at.config).items() if role not in present}
    return Supervision(
        at.settings.run.name,
        at.live,
        Process.of("broker", first.get("broker")) if is_embedded else None,
        "" if is_embedded else at.table.connection.address.url,
        Process.of("recorder", first["recorder"]) if first.get("recorder") is not None else None,
        [_node(at, n, nodes.get(n, {}), roots.get(n, {}), leases) for n in nodes or ["0"]],
        {name[:80]: why for name, why in sorted(forged.items())[:MAX_FORGED]},
        missing,
    )


def _node(at: Connected, n: str, node: dict[str, Any], root: Mapping[str, Any], leases: Mapping[str, Any]) -> Node:
    name = ("node" if n == "0" else f"node {n}") + (f" {str(node['name'])[:80]}" if "name" in node else "")
    states, gpus = children_of(node), node.get("gpus")
    leased = gpus if isinstance(gpus, dict) else {}
    names = list(states) if node or not at.live else _expected(at.config)
    return Node(
        name,
        Process.of(name, root.get("node") if at.live else None),
        _seconds(node) if node else None,
        node.get("spot") is True,
        Process.of("zygote", node.get("zygote")) if not node or node.get("zygote") is not None else None,
        [Process.of(child, states.get(child), leased.get(child), leases.get(child)) for child in names],
        MachineUse.of(node.get("machine")),
    )


def supervision_tree(seen: Supervision) -> Tree:
    """Draw the tree of broker, nodes, pools and actors."""
    root = Tree(f"run {seen.run}" + ("" if seen.live else " (not up)"))
    if seen.broker is None:
        root.add(printable(f"broker {seen.broker_url}"))
    else:
        root.add(_with_state("broker, embedded", seen.broker))
    if seen.recorder is not None:
        root.add(_with_state("recorder", seen.recorder))
    for node in seen.nodes:
        branch = root.add(_of_node(node))
        for line in [] if node.machine is None else node.machine.lines():
            branch.add(printable(line))
        if node.zygote is not None:
            branch.add(_with_state("zygote", node.zygote))
        pools: dict[str, Tree] = {}
        for actor in node.actors:
            role = actor.name.rpartition(".")[0]
            if role not in pools:
                pools[role] = branch.add(printable(f"{role[:80]}, one_for_one"))
            gpus = f", {shown(actor.gpus)}" if actor.gpus else ""
            pools[role].add(_with_state(actor.name, actor).append(gpus).append(_incarnation(actor)))
    for name, why in seen.ignored.items():
        root.add(Text(printable(f"entry lease.{name} is no lease and is ignored: {why}"), "red"))
    for role, what in seen.missing.items():
        root.add(Text(printable(f"{role} has no actor on any node: {what}"), "red"))
    return root


def _of_node(node: Node) -> Text:
    known = node.lease_seconds is not None
    lease = Text(f", lease for {node.lease_seconds:.0f} s") if known else Text.assemble(", ", ("no lease", "red"))
    text = _with_state(node.name, node.supervisor).append_text(Text(", spot" if node.spot else ""))
    return text.append_text(lease)


def _expected(config: Config) -> list[str]:
    from relax_actors.roles import replicas, roles_at_start  # noqa: PLC0415 as above

    return [f"{role}.{n}" for role in roles_at_start(config) for n in range(replicas(config, role))]


def _order(name: str) -> tuple[str, int]:
    role, _, n = name.rpartition(".")
    return role, int(n) if n.isdigit() else -1


def _seconds(lease: Mapping[str, Any]) -> float:
    """Return the seconds since field `since`."""
    return round(time.time() - number(lease.get("since"), 0.0), 1)


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and number(value, -1) == value else None


def _with_state(name: str, process: Process) -> Text:
    """Return the name of a process, and its state as its supervisor reports it."""
    if process.phase is None:
        return Text.assemble(printable(name), " ", ("unknown", "red"))
    pid = f", pid {process.pid}" if process.pid else ""
    state = f"{process.phase} for {process.seconds:.0f} s, {counted(process.restarts, 'restart')}"
    return Text(printable(f"{name} {state}{pid}"))


def _incarnation(actor: Process) -> str:
    if actor.up_seconds is None:
        return ""
    code = f", code {actor.code}" if actor.code else ""
    return printable(f", incarnation {actor.incarnation}{code}, up {actor.up_seconds:.0f} s: {actor.activity}")
