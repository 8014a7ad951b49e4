"""Whichever rank of the torch engine is killed, the run ends with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.killed_ranks import check_killed_ranks
from tests.support.running import IMAGES, ON_POLICY, TINY, Run

RANKS = ("trainer.torch.ranks=2", *ON_POLICY)
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
REPLAYED = (
    *(f"model.architecture.{name}={value}" for name, value in EXPERTS.items()),
    "trainer.router_replay=true",
    "trainer.async_checkpoints=true",
)
PICTURES = ("trainer.max_tokens_per_microbatch=128",)
MOMENTS = (("batch.1", 1), ("weights.4", 0), ("batch.4", None))
"""Cells after which a rank, or the trainer itself, is killed."""
CRITIC = (
    *ON_POLICY,
    "run.steps=5",
    "trainer.minibatches=2",
    "trainer.checkpoint_every=3",
    "algorithm.name=ppo",
    "algorithm.kl.place=none",
    "critic.learning_rate=1e-3",
    "critic.torch.ranks=2",
)
CRITIC_MOMENTS = (("critic.0", 0), ("critic_checkpoint.3", None), ("batch.3", 1))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("more", "config"), [((), TINY), (REPLAYED, TINY), (PICTURES, IMAGES)], ids=["dense", "experts replayed", "images"]
)
def test_killed_ranks_do_not_change_the_weights(
    make_run: Callable[..., Run], more: tuple[str, ...], config: Path
) -> None:
    check_killed_ranks(make_run, (*RANKS, "run.steps=6", *more), "trainer", MOMENTS, config)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_ranks_of_the_critic_change_neither_policy_nor_critic(make_run: Callable[..., Run]) -> None:
    check_killed_ranks(make_run, CRITIC, "critic", CRITIC_MOMENTS)
