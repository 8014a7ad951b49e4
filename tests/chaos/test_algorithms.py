"""Advantages and losses that need a whole step, single tokens, a greedy sample or state, under kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.equivalence import compare

KL_IN_REWARD = (
    "algorithm.kl.place=reward",
    "algorithm.kl.kind=k1",
    "algorithm.kl.coefficient=0.05",
    "algorithm.kl.target=0.01",
    "algorithm.kl.horizon=100",
    "roles.reference.actor=reference",
)
CASES = {
    "whitened tokens with an adaptive KL": (
        "algorithm.advantage=returns",
        "algorithm.scale=none",
        "algorithm.whiten=tokens",
        "algorithm.gamma=0.9",
        *KL_IN_REWARD,
    ),
    "running means": ("algorithm.advantage=ema", "algorithm.scale=none", "data.function=tiny_tasks.with_roles"),
    "a reference that is refreshed": (
        "algorithm.reference_every=3",
        "algorithm.kl.place=loss",
        "algorithm.kl.coefficient=0.2",
        "roles.reference.actor=reference",
    ),
    "pairs of the best and the worst sample": (
        "algorithm.name=online_dpo",
        "algorithm.shaping.filter_zero_variance=false",
        "algorithm.pairs.losses={aot = 1.0, sigmoid = 1.0}",
        "roles.reference.actor=reference",
    ),
    "imitation of correct samples, and a critic with a lambda of its own": (
        "algorithm.name=vapo",
        "algorithm.correct_reward=0.05",
        "algorithm.proximal=trainer",
        "trainer.minibatches=2",
        "critic.learning_rate=1e-3",
    ),
    "a greedy sample": ("algorithm.advantage=greedy", "algorithm.scale=none"),
    "an optimal token baseline": (
        "algorithm.advantage=optimal_token",
        "algorithm.scale=none",
        "roles.squares.replicas=1",
    ),
    "a loss with a random choice of tokens and adaptive coefficients": (
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
    text, tally, result, story = compare(tmp_path, kills=12, seed=5, settings=CASES[case])
    assert result["alone"] == result["weights_fingerprint"], text
    assert tally.by_victim["trainer.0"] > 0, text
    assert sum(event["replayed"] for event in story.of("recovered")) > 0, text
    assert story.of("replay_diverged") == []
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
