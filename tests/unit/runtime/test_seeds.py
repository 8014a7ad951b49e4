"""Seeds and task order of a run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.subjects import RowId
from relax_actors.runtime.seeds import derive_seed, task_index


@given(st.integers(0, 2**31 - 1), st.integers(1, 9), st.integers(1, 40), st.integers(0, 3))
def test_each_task_comes_once_an_epoch(seed: int, rows: int, size: int, epoch: int) -> None:
    places = [divmod(place, rows) for place in range(epoch * size, (epoch + 1) * size)]
    assert sorted(task_index(seed, RowId(*place), rows, size) for place in places) == list(range(size))


def test_epochs_and_runs_have_different_orders() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(task_index(seed, RowId(epoch * 8 + step, i), 8, 64) for step in range(8) for i in range(8))

    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


@given(
    st.integers(0, 2**31 - 1), st.integers(0, 10**6), st.integers(1, 9), st.integers(0, 10**6), st.integers(1, 10**9)
)
def test_successor_gets_the_same_task_every_time(seed: int, step: int, rows: int, beyond: int, size: int) -> None:
    row = RowId(step, rows + beyond)
    found = task_index(seed, row, rows, size)
    assert 0 <= found < size
    assert task_index(seed, row, rows, size) == found


def test_seeds_have_63_bits_and_depend_on_every_part() -> None:
    assert derive_seed(1, "row", 2, 3) == derive_seed(1, "row", 2, 3)
    seeds = {
        derive_seed(run, kind, step, i) for run in range(4) for kind in "ab" for step in range(20) for i in range(20)
    }
    assert len(seeds) == 4 * 2 * 20 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, "row", 12, 3) != derive_seed(1, "row", 1, 23)


def test_seeds_do_not_change_between_releases() -> None:
    assert derive_seed(0, "row", 0, 0) == 8737435638203586162
    assert [task_index(7, RowId(0, i), 4, 10) for i in range(4)] == [0, 8, 3, 6]
