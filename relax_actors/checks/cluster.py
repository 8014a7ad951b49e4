"""Placement of a run on nodes on paper: actors, memory, and what does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from relax_actors.checks.capacity import copied_bytes, engine_bytes, host_bytes, moves_to_host, offloads, shared_bytes
from relax_actors.config import Config
from relax_actors.counted import counted
from relax_actors.data.checked_run import CheckedRun
from relax_actors.data.model_folder import ModelFacts
from relax_actors.devices.cluster import spread
from relax_actors.devices.inventory import Inventory
from relax_actors.devices.placement import Gpus, needs_of_actors, shown
from relax_actors.errors import ConfigError
from relax_actors.operations.plan import SPAN
from relax_actors.registry.catalog import ROLES
from relax_actors.roles import built_in_spec, replicas, role_names, roles_at_start
from relax_actors.roles.gpus import needs_of_roles

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PlacedActor:
    """An actor on a node.

    Attributes:
        role: its role.
        actor: its name.
        node: number of the node.
        gpus: its GPUs there; empty for the CPU.
        device_bytes: memory of each of its GPUs that it takes, by estimate.
        host_bytes: memory of the node that it takes by itself, by estimate.
    """

    role: str
    actor: str
    node: int
    gpus: Gpus
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What a node does for a run.

    Attributes:
        node: its number; node 0 is that of `relax up`.
        actors: number of actors of each of its roles.
        gpus: number of GPUs that they use.
        host_bytes: memory of the node that they take, by estimate.
        arguments: what starts it, after `relax up` and the configuration or after `relax node`.
    """

    node: int
    actors: Mapping[str, int]
    gpus: int
    host_bytes: int
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that starts it."""
        return " ".join(["relax node" if self.node else "relax up", *self.arguments])


@dataclass(frozen=True, slots=True)
class ClusterPlacement:
    """Actors of a run on several nodes, and what does not fit.

    Attributes:
        actors: the actors.
        problems: a line for each problem.
        shared_bytes: memory of each node for the copies of weights that its actors share, by estimate.
    """

    actors: tuple[PlacedActor, ...]
    problems: tuple[str, ...]
    shared_bytes: tuple[int, ...]


def place_on_nodes(
    config: Config, nodes: Sequence[Inventory], facts: ModelFacts, more: Mapping[str, int] | None = None
) -> ClusterPlacement:
    """Place a run's actors on nodes with GPUs; those without need are on node 0.

    `more` are additional actors of roles on every node but the first; they compute on CPUs.
    """
    roles = role_names(config)
    elsewhere = {role for role in roles if role in ROLES.built_in and built_in_spec(role).is_elsewhere}
    names = {role: [f"{role}.{n}" for n in range(replicas(config, role))] for role in roles}
    needs = needs_of_actors(needs_of_roles(config, roles), names)
    layout = spread(needs, nodes, elsewhere, SPAN)
    placed = []
    for node, (actors, placement) in enumerate(zip(layout.nodes, layout.placements, strict=True)):
        added = [f"{role}.{node * SPAN + n}" for role, count in (more or {}).items() if node for n in range(count)]
        for actor in (*actors, *added):
            gpus = placement.gpus.get(actor, ())
            placed.append(_placed(config, facts, actor, node, gpus))
    needy = {need.role for need in needs}
    placed += [_placed(config, facts, actor, 0, ()) for role in roles if role not in needy for actor in names[role]]
    order = {role: i for i, role in enumerate(roles)}
    placed.sort(key=lambda one: (one.node, order[one.role], int(one.actor.rpartition(".")[2])))
    of_nodes = [{one.role for one in placed if one.node == node} for node in range(len(nodes))]
    shared = tuple(shared_bytes(config, of_node, facts) for of_node in of_nodes)
    return ClusterPlacement(tuple(placed), (*layout.problems, *_too_large(config, placed, nodes)), shared)


def _placed(config: Config, facts: ModelFacts, actor: str, node: int, gpus: Gpus) -> PlacedActor:
    role = actor.rpartition(".")[0]
    model, host = engine_bytes(config, role, facts), host_bytes(config, role)
    host += copied_bytes(config, role, facts)
    if gpus:
        is_offloaded = offloads(config, role)
        host += model if is_offloaded or moves_to_host(config, role) else 0
        return PlacedActor(role, actor, node, gpus, 0 if is_offloaded else model // len(gpus), host)
    return PlacedActor(role, actor, node, gpus, 0, host + model)


def _at_once(config: Config, users: Sequence[PlacedActor]) -> int:
    """Return bytes of actors of one GPU: of those that take turns, the largest."""
    leave = [one for one in users if config.placement.leaves_device(one.role)]
    stay = sum(one.device_bytes for one in users if one not in leave)
    return stay + max((one.device_bytes for one in leave), default=0)


def _too_large(config: Config, actors: Sequence[PlacedActor], nodes: Sequence[Inventory]) -> Iterator[str]:
    """Yield a line for each set of actors whose models do not fit on a GPU that they have."""
    told = set()
    for node, inventory in enumerate(nodes):
        for gpu in inventory.gpus:
            users = [one for one in actors if one.node == node and gpu.number in one.gpus]
            need, roles = _at_once(config, users), tuple(dict.fromkeys(one.role for one in users))
            if need > gpu.memory and roles not in told:
                told.add(roles)
                needs = "needs" if len(roles) == 1 else "need"
                yield (
                    f"{' and '.join(roles)} {needs} about {need / GIB:.0f} GiB of GPU {gpu.number} of node {node}, "
                    f"which has {gpu.memory / GIB:.0f} GiB; share the model among more ranks (tensor_parallel, "
                    'pipeline_parallel, expert_parallel), or use trainer.precision = "bfloat16"'
                )


def check_nodes(run: CheckedRun, nodes: Sequence[Inventory], facts: ModelFacts) -> None:
    """Refuse a run that does not fit on nodes; raises ConfigError with a line a role."""
    if problems := place_on_nodes(run.config, nodes, facts).problems:
        raise ConfigError(*problems)


def node_shares(config: Config, placement: ClusterPlacement) -> list[NodeShare]:
    """Return what each node does that has an actor."""
    actors = placement.actors
    return [
        _share(config, node, [one for one in actors if one.node == node], placement.shared_bytes[node])
        for node in sorted({one.node for one in actors})
    ]


def _share(config: Config, node: int, actors: Sequence[PlacedActor], shared: int) -> NodeShare:
    counts = Counter(one.role for one in actors)
    if node:
        arguments = [f"--role={role}={count}" for role, count in counts.items()]
    else:
        arguments = [f"{role}.replicas={count}" for role, count in counts.items() if count != replicas(config, role)]
        if set(roles_at_start(config)) - set(counts):
            arguments.append(f"--roles={','.join(counts)}")
    gpus = {gpu for one in actors for gpu in one.gpus}
    return NodeShare(node, counts, len(gpus), shared + sum(one.host_bytes for one in actors), tuple(arguments))


def placement_lines(config: Config, nodes: Sequence[Inventory], placement: ClusterPlacement) -> Iterator[str]:
    """Yield the placement as a table, and each node's memory and command."""
    rows = [("role", "actor", "node", "devices", "memory")]
    for one in placement.actors:
        device = f"{one.device_bytes / GIB:.1f} GiB" + (" each" if len(one.gpus) > 1 else "")
        memory = device if one.gpus else f"{one.host_bytes / GIB:.1f} GiB of the node"
        rows.append((one.role, one.actor, str(one.node), shown(one.gpus) if one.gpus else "CPU", memory))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    shares = {share.node: share for share in node_shares(config, placement)}
    for node, inventory in enumerate(nodes):
        here = [one for one in placement.actors if one.node == node]
        idle = counted(len(inventory.gpus) - len({n for one in here for n in one.gpus}), "idle GPU")
        share, shared = shares.get(node), placement.shared_bytes[node] / GIB
        host = 0.0 if share is None else share.host_bytes / GIB
        copies = f" ({shared:.0f} GiB of it copies of weights that they share)" if shared else ""
        command = "" if share is None else f"; {share.command}"
        memory = f"{host:.0f} GiB of memory besides GPUs{copies}"
        yield f"node {node}: {counted(len(here), 'actor')}, {memory}, {idle}{command}"
