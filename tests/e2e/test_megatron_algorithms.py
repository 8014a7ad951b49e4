"""Runs whose policy two Megatron-Core ranks train: by PPO with a critic, from a teacher, and with optimal baselines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.faults import story_of
from tests.support.running import Run
from tests.support.tiny_megatron import skip_if_missing

skip_if_missing()

RANKS = (
    "run.steps=3",
    "trainer.backend=megatron",
    "trainer.megatron.ranks=2",
    "trainer.megatron.tensor_parallel=2",
    "model.architecture.num_key_value_heads=2",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_critic_teacher_and_squares_serve_two_ranks(make_run: Callable[..., Run]) -> None:
    critic = ("algorithm.name=ppo", "algorithm.kl.place=none", "critic.learning_rate=1e-3")
    first = make_run("critic", *RANKS, *critic)
    assert first.complete()["quarantined"] == 0
    assert any("value_loss" in metric for metric in story_of(first).metrics if metric.get("kind") == "critic")
    distil = ("algorithm.distil.place=loss", "algorithm.distil.kind=jsd", "algorithm.distil.top_k=4")
    taught = make_run("teacher", *RANKS, *distil, f"roles.teacher.model={first.folder.model}")
    assert taught.complete()["quarantined"] == 0
    assert all(metric["distil"] > 0 for metric in story_of(taught).steps())
    squares = ("algorithm.name=optimal_token_baseline", "roles.squares.backend=megatron")
    assert make_run("squares", *RANKS, *squares).complete()["quarantined"] == 0
