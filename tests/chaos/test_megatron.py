"""Whichever rank of a trainer or critic of two ranks is killed, the run ends with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.run_kinds import EXAMPLES
from tests.support.killed_ranks import Moments, check_killed_ranks
from tests.support.running import IMAGES, ON_POLICY, TINY, Run
from tests.support.tiny_megatron import skip_if_missing

skip_if_missing()

TWO = ("trainer.backend=megatron", "trainer.megatron.ranks=2")
RANKS = (*TWO, *ON_POLICY)
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
REPLAYED = (
    *(f"model.architecture.{name}={value}" for name, value in EXPERTS.items()),
    "trainer.router_replay=true",
    "trainer.megatron.expert_parallel=2",
    "trainer.megatron.grouped_experts=true",
)
# One row is a micro-batch, and rows come one after the other: two ranks compute on rows 0 and 1 when row 2 is there.
STREAMED = ("trainer.max_tokens_per_microbatch=64", "reward.function=tiny_tasks.slow_share_of_sevens")
# Both stages encode pictures, for the first one.
PICTURES = (
    "run.steps=8",
    "trainer.max_tokens_per_microbatch=128",
    "trainer.megatron.pipeline_parallel=2",
)
SCORES = (
    *TWO,
    "trainer.megatron.pipeline_parallel=2",
    "algorithm.name=reward_model",
    "data.function=tiny_tasks.pairs",
)
MOMENTS = (("weights.0", 1), ("batch.2", 0), ("weights.4", 1), ("batch.6", None))
"""Cells after which a rank, or the trainer itself, is killed."""
MID_STEP = (("group.2.2.advantage", None), ("group.4.2.advantage", 0), ("group.5.2.advantage", 1), ("batch.6", None))


CRITIC = (
    *ON_POLICY,
    "run.steps=5",
    "trainer.minibatches=2",
    "trainer.checkpoint_every=3",
    "algorithm.name=ppo",
    "algorithm.kl.place=none",
    "critic.learning_rate=1e-3",
    "critic.backend=megatron",
    "critic.megatron.ranks=2",
    "critic.megatron.pipeline_parallel=2",
)
CRITIC_MOMENTS = (("critic.0", 0), ("batch.1", 1), ("critic_checkpoint.3", None), ("batch.3", 0))
"""Cells after which a rank of the critic, or the critic itself, is killed."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("more", "moments", "config"),
    [((), MOMENTS, TINY), (REPLAYED, MOMENTS, TINY), (STREAMED, MID_STEP, TINY), (PICTURES, MOMENTS, IMAGES)],
    ids=["dense", "experts replayed", "in a streamed step", "images"],
)
def test_killed_ranks_do_not_change_the_weights(
    make_run: Callable[..., Run], more: tuple[str, ...], moments: Moments, config: Path
) -> None:
    story = check_killed_ranks(make_run, (*RANKS, *more), "trainer", moments, config)
    if more == STREAMED:
        early = [metric["early_seconds"] for metric in story.metrics if "early_seconds" in metric]
        assert max(early) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_ranks_do_not_change_the_weights_of_a_reward_model(make_run: Callable[..., Run]) -> None:
    check_killed_ranks(make_run, SCORES, "trainer", MOMENTS, EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_ranks_of_the_critic_change_neither_policy_nor_critic(make_run: Callable[..., Run]) -> None:
    check_killed_ranks(make_run, CRITIC, "critic", CRITIC_MOMENTS)
