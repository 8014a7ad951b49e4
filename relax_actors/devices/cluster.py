"""Which actor runs on which node: pure, from needs and inventories."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from relax_actors.counted import counted
from relax_actors.devices.inventory import Inventory, simulate
from relax_actors.devices.placement import Need, Placement, place
from relax_actors.errors import ConfigError

_NODES = re.compile(r"([1-9]\d{0,2})x(\d{1,4}(?:x\d{1,6}GiB)?)")


def simulated_nodes(text: str) -> list[Inventory]:
    """Return nodes on paper, "2x8" or "2x8x80GiB"; raises ConfigError."""
    match = _NODES.fullmatch(text)
    if match is None:
        msg = f"--nodes {text!r} is not a number of nodes and their GPUs; write 2x8, or 2x8x80GiB"
        raise ConfigError(msg)
    return [simulate(match[2])] * int(match[1])


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the actors of a run go.

    Attributes:
        nodes: actors of each node in the order of `needs`, by name.
        placements: GPUs of the actors of each node.
        problems: why actors go nowhere, a line for each role.
    """

    nodes: list[list[str]]
    placements: list[Placement]
    problems: list[str]


def spread(needs: Sequence[Need], nodes: Sequence[Inventory], elsewhere: Collection[str], span: int) -> Spread:
    """Give each actor the first node that has GPUs for it.

    Node 0 is that of `relax up`. The actors of a role on node k are numbered from `k * span`.

    Args:
        needs: actors to place, in the order in which they get GPUs; their numbers are those of a single node.
        nodes: GPUs of each node.
        elsewhere: roles whose actors are on other nodes than node 0.
        span: numbers of a node.
    """
    chosen: list[list[Need]] = [[] for _ in nodes]
    homeless: dict[str, list[Need]] = {}
    for need in needs:
        candidates = [k for k in range(len(nodes)) if k > 0 or need.role not in elsewhere]
        node = next((k for k in candidates if _fits(need, chosen[k], nodes[k])), None)
        if node is None and candidates and need.may_use_cpu and not need.is_required:
            node = candidates[0]
        if node is None:
            homeless.setdefault(need.role, []).append(need)
            continue
        before = sum(other.role == need.role for other in chosen[node])
        chosen[node].append(replace(need, actor=f"{need.role}.{node * span + before}"))
    placements = [place(there, gpus.numbers) for there, gpus in zip(chosen, nodes, strict=True)]
    problems = [_problem(role, lacking, nodes) for role, lacking in homeless.items()]
    return Spread([[need.actor for need in there] for there in chosen], placements, problems)


def _fits(need: Need, others: Sequence[Need], gpus: Inventory) -> bool:
    return need.actor in place([*others, need], gpus.numbers).gpus


def _problem(role: str, lacking: Sequence[Need], nodes: Sequence[Inventory]) -> str:
    each = f"{counted(lacking[0].gpus, 'GPU')}{' each' if len(lacking) > 1 else ''}"
    fit = "fits" if len(lacking) == 1 else "fit"
    there = ", ".join(f"node {k} has {len(gpus.gpus)}" for k, gpus in enumerate(nodes))
    return (
        f"{counted(len(lacking), 'actor')} of {role} with {each} {fit} on no node ({there}); take more nodes, fewer "
        "replicas or ranks, or let roles take turns on a GPU (placement.colocate)"
    )
