"""Dynamic loss scale of float16."""

from __future__ import annotations

import math

import pytest

from relax_actors.engines.torch.loss_scale import SMALLEST, LossScale


def test_overflows_halve_the_scale_below_one() -> None:
    scale = LossScale(2.0, growth_interval=10)
    for _ in range(3):
        assert scale.metrics_of(math.inf, [0.5])["skipped_updates"] == 1
    assert scale.value == 0.25


def test_overflow_with_the_smallest_scale_is_an_error() -> None:
    with pytest.raises(FloatingPointError):
        LossScale(SMALLEST, growth_interval=10).metrics_of(math.inf, [0.5])


def test_overflow_without_a_scale_is_an_error() -> None:
    with pytest.raises(FloatingPointError):
        LossScale().metrics_of(math.nan, [0.5])


def test_scale_doubles_after_updates_without_overflow() -> None:
    scale = LossScale(1.0, growth_interval=2)
    found = [scale.metrics_of(1.0, [0.5])["loss_scale"] for _ in range(5)]
    assert found == [1, 1, 2, 2, 4]
