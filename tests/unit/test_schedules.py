"""Properties of the learning-rate schedules."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.algorithms.schedules import ScheduleKind, learning_rate, reference_version, scheduled_learning_rate
from relax_actors.config import load_config
from tests.support.running import TINY

KINDS = st.sampled_from(["constant", "linear", "cosine"])
RUNS = st.integers(1, 60).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))


@given(KINDS, RUNS, st.floats(0, 1))
def test_learning_rate_rises_during_warm_up_only(
    kind: ScheduleKind, run: tuple[int, int], final_fraction: float
) -> None:
    warmup, total = run
    rates = [
        learning_rate(s, base=3e-4, warmup_steps=warmup, total_steps=total, kind=kind, final_fraction=final_fraction)
        for s in range(total + 3)
    ]
    peak = max(warmup - 1, 0)
    assert rates[peak] == 3e-4
    assert all(a < b for a, b in pairwise(rates[: peak + 1]))
    assert all(a >= b - 1e-18 for a, b in pairwise(rates[peak:]))
    assert rates[0] > 0
    floor = 3e-4 if kind == "constant" else final_fraction * 3e-4
    assert rates[total:] == pytest.approx([floor] * 3)
    if peak < total - 1:
        assert rates[total - 1] == pytest.approx(floor)


def test_first_step_of_warm_up_uses_base_divided_by_warmup_steps() -> None:
    rate = partial(learning_rate, base=1.0, warmup_steps=4, total_steps=9, kind="linear", final_fraction=0.0)
    assert [rate(s) for s in range(9)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])


def test_cosine_is_halfway_in_the_middle() -> None:
    rate = partial(learning_rate, base=2.0, warmup_steps=0, total_steps=5, kind="cosine", final_fraction=0.5)
    assert [rate(0), rate(2), rate(4)] == pytest.approx([2.0, 1.5, 1.0])
    assert rate(1) > 1.75  # flatter than linear at the start


def test_run_of_one_step_uses_the_base_rate() -> None:
    assert learning_rate(0, base=1.0, warmup_steps=0, total_steps=1, kind="cosine", final_fraction=0.0) == 1.0


@pytest.mark.parametrize(
    ("step", "warmup", "total", "fraction"), [(-1, 0, 5, 0.0), (0, 6, 5, 0.0), (0, -1, 5, 0.0), (0, 0, 5, 1.5)]
)
def test_invalid_schedule_is_refused(step: int, warmup: int, total: int, fraction: float) -> None:
    with pytest.raises(ValueError, match="need step >= 0"):
        learning_rate(step, base=1.0, warmup_steps=warmup, total_steps=total, kind="linear", final_fraction=fraction)


def test_warm_up_longer_than_the_run_is_cut_to_the_run() -> None:
    config = load_config(TINY, ["run.steps=4", "trainer.warmup_steps=50", "trainer.schedule=linear"])
    base = config.trainer.learning_rate
    assert [scheduled_learning_rate(config, step) / base for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize(
    ("every", "lead", "expected"),
    [
        (None, 1, [0, 0, 0, 0, 0, 0, 0, 0]),
        (3, 0, [0, 0, 0, 3, 3, 3, 6, 6]),
        (3, 1, [0, 0, 0, 0, 3, 3, 3, 6]),
        (1, 2, [0, 0, 0, 1, 2, 3, 4, 5]),
    ],
)
def test_reference_of_a_step_is_a_version_that_is_published_before_its_rows(
    every: int | None, lead: int, expected: list[int]
) -> None:
    overrides = [f"staleness.max={lead}", *([] if every is None else [f"algorithm.reference_every={every}"])]
    config = load_config(TINY, overrides)
    assert [reference_version(config, step) for step in range(8)] == expected
