"""Which rank trains which sequences; it follows from the sequences alone, so a replayed step has the same shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from relax_actors.algorithms.micro_batches import Shared, group_work
from relax_actors.engines.protocols.samples import TrainSample, input_lengths, shared_work


def share_out(
    samples: Sequence[TrainSample], ranks: int, *, share_prefixes: bool, keeps_rows: bool = False
) -> list[list[int]]:
    """Share sequences out so that the rank with the most work has as little as possible; returns those of each rank.

    Sequences that share work, a prefix if `share_prefixes`, stay together, unless dealing them out one by one leaves
    less to the busiest rank. With `keeps_rows`, those of a row stay together in any case, as their loss is one.
    """
    lengths = input_lengths(samples)
    shared = shared_work(samples, share_prefixes=share_prefixes)
    if keeps_rows:
        return _together(lengths, ranks, _by_row(samples, shared))
    dealt = _dealt(lengths, ranks)
    if shared is None or ranks == 1:
        return dealt

    def busiest(shares: list[list[int]]) -> int:
        return max(_work([samples[i] for i in share], share_prefixes=share_prefixes) for share in shares)

    together = _together(lengths, ranks, shared)
    return together if busiest(together) <= busiest(dealt) else dealt


def _by_row(samples: Sequence[TrainSample], shared: Shared | None) -> Shared:
    """Return the work that sequences share, with the row of each as its group."""
    rows, n = [sample.row for sample in samples], len(samples)
    if shared is None:
        return Shared(rows, range(n), [0] * n, [1] * n, [{}] * n)
    return replace(shared, groups=rows)


def rows_are_whole(samples: Sequence[TrainSample], batches: Iterable[Sequence[int]]) -> bool:
    """Whether all sequences of each row are in one micro-batch; `batches` are indices into `samples`, of all ranks."""
    rows = [row for batch in batches for row in {samples[index].row for index in batch}]
    return len(rows) == len(set(rows))


def _work(samples: Sequence[TrainSample], *, share_prefixes: bool) -> int:
    shared = shared_work(samples, share_prefixes=share_prefixes)
    lengths = input_lengths(samples)
    return sum(lengths if shared is None else group_work(lengths, shared).values())


def _dealt(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Sequences of each rank, dealt out longest first."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for position, index in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        # Alternate the direction, so that the rank with the longest sequence of a round gets the shortest of the next.
        rank, reverse = position % ranks, (position // ranks) % 2
        shares[ranks - 1 - rank if reverse else rank].append(index)
    return shares


def _together(lengths: Sequence[int], ranks: int, shared: Shared) -> list[list[int]]:
    """Sequences of each rank; each group goes to the rank with the least work, the largest group first."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(shared.groups):
        members.setdefault(group, []).append(index)
    work = group_work(lengths, shared)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for group in sorted(members, key=lambda group: (-work[group], members[group][0])):
        rank = loads.index(min(loads))
        shares[rank] += members[group]
        loads[rank] += work[group]
    return shares
