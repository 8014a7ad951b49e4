"""Which rank writes which tensors: a rank that holds them, and each about as much."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relax_actors.engines.ranks.dealing import Entry, deal, nearest

RANKS = 6
ENTRIES = st.lists(
    st.builds(Entry, st.integers(1, 1000), st.sets(st.integers(0, RANKS - 1), min_size=1).map(sorted)), max_size=40
)


@given(entries=ENTRIES, writers=st.integers(1, RANKS))
def test_each_entry_goes_to_a_rank_that_writes_and_holds_it_if_there_is_one(entries: list[Entry], writers: int) -> None:
    owners = deal(entries, writers)
    assert len(owners) == len(entries)
    for entry, owner in zip(entries, owners, strict=True):
        assert owner < writers
        assert owner in entry.holders or not any(rank < writers for rank in entry.holders)


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60), ranks=st.integers(1, RANKS))
def test_ranks_that_hold_everything_write_about_the_same(sizes: list[int], ranks: int) -> None:
    owners = deal([Entry(size, range(ranks)) for size in sizes], ranks)
    written = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert max(written) - min(written) <= max(sizes)


def test_a_part_comes_from_the_nearest_rank() -> None:
    assert nearest([1, 5], 5) == 5
    assert nearest([1, 5], 4) == 5
    assert nearest([1, 5], 0) == nearest([1, 5], 3) == 1
