"""Episodes of each adapter, with the real packages: the trainer has the log-probs that the rollout sampled with."""

from __future__ import annotations

import string
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from tests.support.faults import story_of
from tests.support.running import Run

ALPHABET = string.digits + string.ascii_letters + string.punctuation.replace("#", "") + " \n#"
EPISODES = (
    f"model.tokenizer.alphabet={ALPHABET}",
    "model.architecture.max_position_embeddings=512",
    "trainer.max_tokens_per_microbatch=4096",
    "rollout.max_tokens=3",
    "reward.function=environment",
    "staleness.max=0",
    "environment.max_turns=3",
    "run.steps=2",
)
MCP = f"{sys.executable} -m tests.support.mcp_server"
ADAPTERS = {
    "gymnasium": ("environment.name=gymnasium", "environment.options.id=tests.support.gym_corridor:Corridor-v0"),
    "mcp": ("environment.name=tiny_mcp.Till", f"environment.options.servers=['{MCP}']"),
    "reasoning_gym": (
        "environment.name=reasoning_gym",
        "data.kind=reasoning_gym",
        "data.task=chain_sum",
        "data.function=",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", ADAPTERS)
def test_trainer_has_the_log_probs_of_the_rollout(package: str, make_run: Callable[..., Run]) -> None:
    if find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed; pip install {package}")
    run = make_run(package, *EPISODES, *ADAPTERS[package])
    assert run.complete()["trained"] == 8
    story = story_of(run)
    assert story.of("environment_failed") == []
    steps = story.steps()
    assert len(steps) == 2
    assert all(step["abs_delta"] <= 1e-5 for step in steps)
    assert max(metric["turns"] for metric in story.metrics if "turns" in metric) > 8 * 4, "episodes have several turns"
