"""Losses that need the whole step, entropies or adaptive coefficients: kills do not change the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.equivalence import compare

CASES = {
    "a random choice of tokens, and adaptive coefficients": (
        "algorithm.surrogate=clip_cov",
        "algorithm.covariance_share=0.1",
        "algorithm.covariance_bounds=[0.01, 100.0]",
        "algorithm.kl.place=loss",
        "algorithm.kl.target=0.01",
        "algorithm.kl.horizon=100",
        "algorithm.entropy.coefficient=0.01",
        "algorithm.entropy.target=1.5",
        "algorithm.entropy.quantile=0.5",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_killed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path, case: str) -> None:
    text, tally, result, story = compare(tmp_path, kills=12, seed=7, settings=CASES[case])
    assert result["alone"] == result["weights_fingerprint"], text
    assert tally.by_victim["trainer.0"] > 0, text
    assert sum(event["replayed"] for event in story.of("recovered")) > 0, text
    assert story.of("replay_diverged") == []
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
