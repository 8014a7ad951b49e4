"""Whichever rank of the torch engine is killed, the run ends with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.equivalence import final_weights
from tests.support.faults import story_of
from tests.support.killed_ranks import kill_ranks
from tests.support.running import IMAGES, ON_POLICY, TINY, Run, processes_of

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
    settings = (*RANKS, "run.steps=6", *more)
    alone = make_run("calm", *settings, config=config).complete()["weights_fingerprint"]
    run = make_run("killed", *settings, config=config).start()
    kill_ranks(run, "trainer", MOMENTS)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert result["weights_fingerprint"] == alone
    assert (result["dropped"], result["quarantined"], result["in_flight"]) == (0, 0, 0)
    story = story_of(run)
    assert story.of("replay_diverged") == []
    crashed = [event for event in story.of("crashed") if event["role"] == "trainer"]
    assert len(crashed) == len(MOMENTS)
    assert all("SIGKILL" in event["reason"] for event in crashed)
    assert processes_of(run.folder.root) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_ranks_of_the_critic_change_neither_policy_nor_critic(make_run: Callable[..., Run]) -> None:
    calm = make_run("calm", *CRITIC)
    alone = final_weights(calm, calm.complete())
    run = make_run("killed", *CRITIC).start()
    kill_ranks(run, "critic", CRITIC_MOMENTS)
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert final_weights(run, result) == alone
    crashed = [event for event in story_of(run).of("crashed") if event["role"] == "critic"]
    assert len(crashed) == len(CRITIC_MOMENTS)
    assert processes_of(run.folder.root) == []
