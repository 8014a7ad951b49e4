"""Which rank trains which sequences: the sequences of a row stay together where their loss is one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.ranks.shares import rows_are_whole, share_out

ROWS = st.lists(st.lists(st.integers(2, 30), min_size=1, max_size=3), min_size=1, max_size=8)


def samples_of(rows: list[list[int]]) -> list[TrainSample]:
    return [
        TrainSample(np.zeros(length, np.int32), np.arange(length) > 0, row=row)
        for row, lengths in enumerate(rows)
        for length in lengths
    ]


@given(rows=ROWS, ranks=st.integers(1, 4), share_prefixes=st.booleans())
def test_rows_stay_on_one_rank_if_asked_for(rows: list[list[int]], ranks: int, *, share_prefixes: bool) -> None:
    samples = samples_of(rows)
    shares = share_out(samples, ranks, share_prefixes=share_prefixes, keeps_rows=True)
    assert sorted(index for share in shares for index in share) == list(range(len(samples)))
    assert rows_are_whole(samples, shares)


def test_row_in_two_micro_batches_is_not_whole() -> None:
    samples = samples_of([[3, 3], [3]])
    assert rows_are_whole(samples, [[0, 1], [2]])
    assert not rows_are_whole(samples, [[0], [1, 2]])
