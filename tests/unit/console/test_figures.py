"""Figures over steps: replays, bounds, and thinning that keeps extremes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_actors.console.figures import MAX_NAMES, Figures
from relax_actors.monitoring.log_message import MAX_NUMBERS, LogMessage


def step(number: int, **figures: Any) -> LogMessage:
    body = {"kind": "step", "role": "trainer", "n": 0, "step": number, **figures}
    message = LogMessage.parse("relax.demo.metric.trainer.0", json.dumps(body).encode())
    assert message is not None
    return message


def test_replayed_step_replaces_its_earlier_values() -> None:
    figures = Figures(100)
    for number, reward in ((0, 1.0), (1, 2.0), (1, 5.0)):
        figures.take(step(number, reward=reward))
    curve = figures.curve("step/reward", 10)
    assert (curve.steps, curve.mean) == ([0, 1], [1.0, 5.0])
    assert (figures.last, figures.latest()) == (1, {"step/reward": 5.0})


def test_replayed_step_keeps_the_times_of_its_first_training() -> None:
    figures = Figures(100)
    figures.take(step(0, reward=1.0, train_seconds=3.0, waited_seconds=2.0))
    figures.take(step(0, reward=2.0, train_seconds=0.1, waited_seconds=0.0))
    assert figures.latest() == {"step/reward": 2.0, "step/train_seconds": 3.0, "step/waited_seconds": 2.0}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_thinned_curve_keeps_extremes_and_number_of_points(values: list[float], points: int) -> None:
    figures = Figures(len(values))
    for number, value in enumerate(values):
        figures.take(step(number, loss=value))
    curve = figures.curve("step/loss", points)
    assert len(curve.steps) == len(curve.mean) <= points
    assert min(curve.low) == min(values)
    assert max(curve.high) == max(values)
    assert all(low <= high for low, high in zip(curve.low, curve.high, strict=True))
    assert curve.steps == sorted(set(curve.steps))


NUMBERS = st.one_of(st.floats(), st.integers(), st.booleans(), st.sampled_from([10**400, -(10**400)]))
FIELDS = st.dictionaries(st.sampled_from(["a", "b", "c", "loss", "version"]), st.one_of(NUMBERS, st.text(max_size=3)))


@settings(max_examples=40)
@given(st.one_of(NUMBERS, st.just(3)), st.lists(FIELDS, min_size=1, max_size=5))
def test_fast_figures_are_those_of_the_message(number: Any, bodies: list[dict[str, Any]]) -> None:
    for body in bodies:  # one after the other, since fields are remembered
        assert_same_figures(step(number, **body))


def test_integers_that_no_float_holds_are_left_out() -> None:
    message = step(0, high=10**400, low=-(10**400), loss=1.0)  # the sum of all is finite
    assert_same_figures(message)
    figures = Figures(100)
    figures.take(message)
    assert figures.latest() == {"step/loss": 1.0}


@pytest.mark.parametrize("count", [MAX_NUMBERS - 1, MAX_NUMBERS])
def test_step_after_many_numbers(count: int) -> None:
    body = {f"figure{number}": 1.0 for number in range(count)} | {"step": 3}
    message = LogMessage.parse("relax.demo.metric.trainer.0", json.dumps({"kind": "step", **body}).encode())
    assert message is not None
    assert_same_figures(message)


def assert_same_figures(message: LogMessage) -> None:
    scalars, figures = message.scalars(), message.figures()
    assert figures == (None if scalars is None else (scalars[0], tuple(scalars[1]), tuple(scalars[1].values())))


def test_part_of_a_curve_has_its_steps_only() -> None:
    figures = Figures(1000)
    for number in range(0, 1000, 2):
        figures.take(step(number, loss=float(number)))
    curve = figures.curve("step/loss", 100, first=100, last=110)
    assert curve.steps == [100, 102, 104, 106, 108, 110]
    assert curve.mean == [100.0, 102.0, 104.0, 106.0, 108.0, 110.0]
    assert figures.curve("step/other", 10).steps == []


@pytest.mark.parametrize("number", [-1, 101, 10**12])
def test_step_that_the_run_does_not_have_is_ignored(number: int) -> None:
    figures = Figures(100)
    figures.take(step(number, loss=1.0))
    assert figures.names() == []


def test_names_are_bounded_and_false_claims_ignored() -> None:
    figures = Figures(10)
    for number in range(5):
        figures.take(step(0, **{f"figure{number}_{k}": 1.0 for k in range(100)}))
    assert len(figures.names()) == MAX_NAMES
    body = {"kind": "step", "role": "trainer", "n": 0, "step": 1, "loss": 1.0}
    forged = LogMessage.parse("relax.demo.metric.reward.0", json.dumps(body).encode())
    assert forged is not None
    assert forged.claim
    other = Figures(10)
    other.take(forged)
    assert other.names() == []
