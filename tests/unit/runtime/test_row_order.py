"""Which row of the data each row of a run is."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.subjects import RowId
from relax_actors.config import Config, load_config
from relax_actors.config.data import DataSection
from relax_actors.data.mixture import Mixture
from relax_actors.data.source import Blocks
from relax_actors.data.task import Task
from relax_actors.runtime.row_order import LISTED, RowOrder, permuted
from tests.support.running import SUPPORT

seeds, sizes = st.integers(0, 2**31 - 1), st.integers(1, 40)


class Rows:
    """A source of numbered tasks, cheap to read in blocks if `blocks` is given."""

    def __init__(self, size: int, blocks: list[int] | None = None, held: int = 1) -> None:
        self.size = size
        if blocks is not None:
            self.blocks = Blocks(np.array(blocks), held)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Task:
        return Task(str(i))


@cache
def tiny() -> Config:
    return load_config(SUPPORT / "tiny.toml")


def config_of(seed: int, rows: int, **data: Any) -> Config:
    whole = tiny()
    section = DataSection.model_validate({"kind": "python", "function": "a.b"} | data)
    parts = {
        "run": whole.run.model_copy(update={"seed": seed}),
        "trainer": whole.trainer.model_copy(update={"prompts_per_step": rows}),
        "data": section,
    }
    return whole.model_copy(update=parts)


def mixture_of(seed: int, rows: int, weights: dict[str, float | None], **data: Any) -> Config:
    part = {"kind": "python", "function": "a.b"}
    parts = {name: part | ({} if weight is None else {"weight": weight}) for name, weight in weights.items()}
    whole = config_of(seed, rows)
    section = DataSection.model_validate({"kind": "mixture", "mixture": parts} | data)
    return whole.model_copy(update={"data": section})


def items(order: RowOrder, rows: int, first: int, last: int) -> list[int]:
    return [order.item(RowId(*divmod(place, rows))) for place in range(first, last)]


@given(seeds, st.integers(1, 9), sizes, st.integers(0, 3))
def test_each_row_comes_once_an_epoch(seed: int, rows: int, size: int, epoch: int) -> None:
    order = RowOrder(config_of(seed, rows), Rows(size))
    assert sorted(items(order, rows, epoch * size, (epoch + 1) * size)) == list(range(size))


def test_epochs_and_runs_have_different_orders() -> None:
    orders = {
        tuple(items(RowOrder(config_of(seed, 8), Rows(64)), 8, epoch * 64, (epoch + 1) * 64))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_order_does_not_change_between_releases() -> None:
    assert items(RowOrder(config_of(7, 4), Rows(10)), 4, 0, 4) == [0, 8, 3, 6]


def test_without_shuffle_rows_come_in_the_order_of_the_data() -> None:
    order = RowOrder(config_of(7, 4, shuffle=False), Rows(10))
    assert items(order, 4, 0, 20) == [*range(10), *range(10)]


@given(seeds, st.integers(0, 10**6), st.integers(1, 9), st.integers(0, 10**6), st.integers(1, 10**9))
def test_successor_gets_the_same_row_every_time(seed: int, step: int, rows: int, beyond: int, size: int) -> None:
    row = RowId(step, rows + beyond)
    item = RowOrder(config_of(seed, rows), Rows(size)).item(row)
    assert 0 <= item < size
    assert RowOrder(config_of(seed, rows), Rows(size)).item(row) == item


@given(seeds, st.integers(LISTED + 1, 5 * LISTED))
def test_large_permutation_is_one_without_a_list(seed: int, size: int) -> None:
    places = np.random.default_rng(seed).choice(size, 2000, replace=False).tolist()
    found = [permuted(seed, size, place) for place in places]
    assert all(0 <= item < size for item in found)
    assert len(set(found)) == 2000
    # A quarter of random places is in each quarter, within five standard deviations.
    quarters = Counter(4 * item // size for item in found)
    assert all(abs(quarters[quarter] - 500) < 100 for quarter in range(4))


def test_every_item_of_a_large_permutation_comes_once() -> None:
    size = LISTED + 3
    assert sorted(permuted(1, size, place) for place in range(size)) == list(range(size))


@given(seeds, st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 2))
def test_rows_in_blocks_come_once_an_epoch_and_from_few_blocks_at_a_time(
    seed: int, blocks: list[int], held: int, epoch: int
) -> None:
    size = sum(blocks)
    order = RowOrder(config_of(seed, 4), Rows(size, blocks, held))
    found = items(order, 4, epoch * size, (epoch + 1) * size)
    assert sorted(found) == list(range(size))
    block_of = np.repeat(np.arange(len(blocks)), blocks)[found].tolist()
    # A block that was left for others outside of its window does not come again.
    visits = 0
    kept: list[int] = []
    for block in block_of:
        if block not in kept:
            kept = [*kept, block][-held:]
            visits += 1
    assert visits == len(blocks)


@given(seeds, st.integers(1, 6), st.integers(1, 12), st.integers(1, 12))
def test_every_source_of_a_mixture_is_passed_row_by_row(seed: int, rows: int, first: int, second: int) -> None:
    config = mixture_of(seed, rows, {"a": 0.75, "b": 0.25})
    order = RowOrder(config, Mixture({"a": Rows(first), "b": Rows(second)}))
    found = items(order, rows, 0, 48)
    counts = Counter(found)
    a, b = [counts[i] for i in range(first)], [counts[first + i] for i in range(second)]
    assert (sum(a), sum(b)) == (36, 12)
    assert max(a) - min(a) <= 1
    assert max(b) - min(b) <= 1


def test_weights_change_at_the_steps_of_a_curriculum_and_no_row_is_left_out() -> None:
    curriculum = [{"step": 4, "weights": {"b": 1.0}}]
    order = RowOrder(mixture_of(1, 4, {"a": 1, "b": 0}, curriculum=curriculum), Mixture({"a": Rows(16), "b": Rows(8)}))
    assert sorted(items(order, 4, 0, 16)) == list(range(16))
    assert sorted(items(order, 4, 16, 24)) == list(range(16, 24))


def test_successor_comes_from_the_source_of_its_slot() -> None:
    order = RowOrder(mixture_of(3, 4, {"a": 0.5, "b": 0.5}), Mixture({"a": Rows(10), "b": Rows(10)}))
    for index in range(4):
        source = order.item(RowId(2, index)) // 10
        assert {order.item(RowId(2, index + 4 * k)) // 10 for k in range(1, 9)} == {source}


def test_sources_without_weights_are_one_data_set() -> None:
    order = RowOrder(mixture_of(1, 4, {"a": None, "b": None}), Mixture({"a": Rows(16), "b": Rows(4)}))
    assert sorted(items(order, 4, 0, 20)) == list(range(20))


@pytest.mark.parametrize("shuffle", [True, False])
def test_mixture_of_blocks_and_rows_comes_once(*, shuffle: bool) -> None:
    config = mixture_of(1, 4, {"a": None, "b": None}, shuffle=shuffle)
    order = RowOrder(config, Mixture({"a": Rows(16, [8, 4, 4]), "b": Rows(9000)}))
    assert sorted(items(order, 4, 0, 9016)) == list(range(9016))
