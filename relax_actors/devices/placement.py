"""Which actor of a node computes on which GPU: pure, from needs and inventory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from relax_actors.counted import counted

Gpus = tuple[int, ...]
"""Numbers of GPUs, in the order in which an actor counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What an actor needs.

    Attributes:
        actor: its name, `<role>.<n>`; empty for what any actor of a role needs.
        gpus: number of GPUs, at least 1.
        first: number of its first GPU where its device is set, such as "cuda:3"; None if any will do.
        group: number of the group of roles that share GPUs on purpose; None for GPUs of its own.
        is_required: whether it must have them even on a node without GPUs.
        may_use_cpu: whether it computes on the CPU of a node whose GPUs are all taken.
    """

    actor: str = ""
    gpus: int
    first: int | None = None
    group: int | None = None
    is_required: bool = False
    may_use_cpu: bool = True

    @property
    def role(self) -> str:
        """Its role."""
        return self.actor.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where actors compute.

    Attributes:
        gpus: GPUs of each actor that has some.
        on_cpu: actors that compute on the CPU although they could use a GPU, as none is free.
        problems: why an actor cannot be placed, by its name: what it needs, what there is, and what to do.
    """

    gpus: dict[str, Gpus] = field(default_factory=dict)
    on_cpu: tuple[str, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)


def needs_of_actors(needs: Mapping[str, Need], actors: Mapping[str, Sequence[str]]) -> list[Need]:
    """Return each actor's needs; a role's first GPU sets those that follow.

    Args:
        needs: what an actor of each role needs, in the order in which roles get GPUs.
        actors: names of the actors of each role.
    """
    return [
        replace(need, actor=actor, first=None if need.first is None else need.first + i * need.gpus)
        for role, need in needs.items()
        for i, actor in enumerate(actors.get(role, ()))
    ]


def place(
    needs: Sequence[Need],
    present: Sequence[int],
    held: Mapping[str, Gpus] | None = None,
    taken: Mapping[int, str] | None = None,
) -> Placement:
    """Give each actor GPUs of its own, or those of its group.

    Actors that hold GPUs keep them; then come those whose GPUs are set, then the others in the order of `needs`. An
    actor with several GPUs takes neighbours if it can. The actors of a group's role take the GPUs of the group one
    after the other, so that each GPU serves one actor of each of its roles.

    Args:
        needs: actors to place.
        present: numbers of the node's GPUs.
        held: GPUs that actors have from an earlier placement.
        taken: GPUs that others use now, and who. An actor that would have one of them does not compute on the CPU
            instead: that is a problem.
    """
    if not present:
        return Placement(problems={need.actor: _problem(need, present, {}) for need in needs if need.is_required})
    gpus = {need.actor: held[need.actor] for need in needs if held and need.actor in held}
    on_cpu, problems = list[str](), dict[str, str]()
    free = [n for n in present if n not in (taken or {})]
    usual = place(needs, present, held).gpus if taken else {}
    shared = _groups(needs)
    waiting = [need for need in needs if need.actor not in gpus]
    for need in sorted(waiting, key=lambda need: need.first is None):
        if chosen := _choose(need, free, gpus, shared):
            gpus[need.actor] = chosen
        elif need.may_use_cpu and not need.is_required and need.actor not in usual:
            on_cpu.append(need.actor)
        else:
            problems[need.actor] = _problem(need, present, gpus, taken)
    return Placement(gpus, tuple(on_cpu), problems)


@dataclass(frozen=True, slots=True)
class _Group:
    """Roles that share GPUs.

    Attributes:
        actors: of all roles.
        size: GPUs that the role with the most needs.
        before: GPUs of a role's actors before each actor.
    """

    actors: frozenset[str]
    size: int
    before: dict[str, int]


def _groups(needs: Iterable[Need]) -> dict[int, _Group]:
    groups: dict[int, _Group] = {}
    for number in sorted({need.group for need in needs if need.group is not None}):
        members = [need for need in needs if need.group == number]
        used, before = dict[str, int](), dict[str, int]()
        for need in members:
            before[need.actor] = used.get(need.role, 0)
            used[need.role] = before[need.actor] + need.gpus
        groups[number] = _Group(frozenset(before), max(used.values()), before)
    return groups


def _choose(need: Need, present: Sequence[int], gpus: Mapping[str, Gpus], shared: Mapping[int, _Group]) -> Gpus:
    """Return GPUs for an actor; empty if there are not enough."""
    group = None if need.group is None else shared[need.group]
    others = {n for actor, taken in gpus.items() if group is None or actor not in group.actors for n in taken}
    free = [n for n in present if n not in others]
    if group is None or need.first is not None:
        return _neighbours(free, need.gpus, need.first)
    # What members hold comes first: it is the group's already.
    own = sorted({n for actor in group.actors for n in gpus.get(actor, ())})
    pool = (own + [n for n in free if n not in own])[: group.size]
    start = group.before[need.actor]
    chosen = tuple(pool[start : start + need.gpus])
    return chosen if len(chosen) == need.gpus else ()


def _neighbours(free: Sequence[int], count: int, first: int | None) -> Gpus:
    runs = [tuple(free[i : i + count]) for i in range(len(free) - count + 1)]
    if first is not None:
        return next((run for run in runs if run[0] == first and _are_neighbours(run)), ())
    return next((run for run in runs if _are_neighbours(run)), tuple(free[:count]) if len(free) >= count else ())


def _are_neighbours(numbers: Gpus) -> bool:
    return all(after == before + 1 for before, after in pairwise(numbers))


def _problem(
    need: Need, present: Sequence[int], gpus: Mapping[str, Gpus], taken: Mapping[int, str] | None = None
) -> str:
    where = "" if need.first is None else f", from number {need.first} on"
    holders = [f"{actor} has {shown(numbers)}" for actor, numbers in gpus.items()]
    holders += [f"GPU {number} {why}" for number, why in (taken or {}).items()]
    there = counted(len(present), "GPU") + (f" ({shown(tuple(present))})" if present else "")
    there += f": {', '.join(holders)}" if holders else ""
    return (
        f"{need.actor} needs {counted(need.gpus, 'GPU')}{where}; this node has {there}. Take fewer replicas or "
        f"ranks, let roles take turns on a GPU (placement.colocate), set {need.role}.device, or start some roles on "
        "another node"
    )


def shown(gpus: Gpus) -> str:
    """Return the numbers of GPUs for people, such as "GPU 0" and "GPUs 0 to 3"."""
    if len(gpus) == 1:
        return f"GPU {gpus[0]}"
    if len(gpus) > 2 and _are_neighbours(gpus):  # noqa: PLR2004
        return f"GPUs {gpus[0]} to {gpus[-1]}"
    return f"GPUs {', '.join(map(str, gpus))}"
