"""Metrics of the mismatch between trainer and rollout: micro-batches add up, and quantiles cover all of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given

from relax_actors.algorithms.corrections import (
    mismatch_metrics,
    ratio_quantiles,
)
from relax_actors.algorithms.losses import add_metrics
from tests.unit.test_corrections import SEEDS, random_step


@given(SEEDS)
def test_mismatch_metrics_of_micro_batches_add_up(seed: int) -> None:
    new, old, _, mask = random_step(seed)
    whole = mismatch_metrics(new, old, mask)
    rows = [mismatch_metrics(new[i : i + 1], old[i : i + 1], mask[i : i + 1]) for i in range(len(mask))]
    assert add_metrics(rows) == pytest.approx(whole)
    delta = (new - old)[mask].detach().double()
    assert whole == pytest.approx(
        {
            "tokens": len(delta),
            "abs_delta": delta.abs().sum().item(),
            "k3": (delta.exp() - 1 - delta).sum().item(),
            "ratio": delta.exp().sum().item(),
            "ratio_squared": (2 * delta).exp().sum().item(),
            "max_ratio": delta.exp().max().item(),
        },
        rel=1e-4,
        abs=1e-5,
    )


def test_mismatch_metrics_without_tokens_are_zero() -> None:
    new, old, _, mask = random_step(0)
    assert set(mismatch_metrics(new, old, torch.zeros_like(mask)).values()) == {0.0}


def test_ratio_quantiles_cover_all_micro_batches() -> None:
    ratios = np.arange(1, 102, dtype=np.float32)
    parts = [np.log(part) for part in np.split(np.random.default_rng(0).permutation(ratios), [3, 50])]
    found = ratio_quantiles(parts)
    assert found == pytest.approx({"ratio_p1": 2, "ratio_p50": 51, "ratio_p99": 100}, rel=1e-5)
    assert ratio_quantiles([]) == {"ratio_p1": 1, "ratio_p50": 1, "ratio_p99": 1}
    assert math.isfinite(ratio_quantiles([np.array([1e6], np.float32)])["ratio_p99"])
