"""`examples/agents/zoom.toml` as `make agents` runs it: a model learns to look closer, and cannot read without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import sglang_servers, tiny_megatron
from tests.support.faults import story_of, wait_for_cell
from tests.support.running import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "zoom.toml"


BLIND = ("run.steps=20", "eval.every=0", "data.function=zoom.blind", "environment.options.tool=false")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_model_learns_to_look_before_it_reads(make_run: Callable[..., Run]) -> None:
    result = make_run("looks", "eval.every=0", config=EXAMPLE).complete(900)
    assert (result["steps"], result["quarantined"]) == (180, 0)
    assert result["eval_last"] >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_digit_cannot_be_read_without_the_tool(make_run: Callable[..., Run]) -> None:
    result = make_run("blind", *BLIND, config=EXAMPLE).complete(600)
    assert 0.1 < result["eval_last"] <= 0.5, "the digit can be read in the whole picture"


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LARGE = (
    "model.architecture.model_type=qwen3_vl_moe",
    *(f"model.architecture.text_config.{name}={value}" for name, value in EXPERTS.items()),
    "rollout.backend=sglang",
    "trainer.backend=megatron",
    "trainer.megatron.ranks=2",
    "trainer.megatron.tensor_parallel=2",
    "trainer.megatron.sequence_parallel=true",
    "trainer.router_replay=true",
    "trainer.warm_start.steps=2",
    "trainer.prompts_per_step=4",
    "environment.sessions=64",
    "rollout.turn_log_after=0",
    "run.steps=6",
    "eval.rows=8",
    "eval.every=0",
    "staleness.max=0",
    "supervision.heartbeat=30",
    "supervision.start_deadline=400",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_experts_of_looks_on_sglang_are_replayed_by_megatron_after_kills(make_run: Callable[..., Run]) -> None:
    sglang_servers.skip_if_missing()
    tiny_megatron.skip_if_missing()
    run = make_run("experts", *LARGE, config=EXAMPLE).start()
    wait_for_cell(run, "group.1.0.turns.0.1", 900)
    run.kill("rollout.0")
    wait_for_cell(run, "batch.2", 900)
    run.kill("trainer.0")
    run.disconnect()
    code, result, said = run.finish(1500)
    assert code == 0, said
    assert (result["steps"], result["trained"]) == (6, 24)
    assert (result["quarantined"], result["dropped"], result["in_flight"]) == (0, 0, 0)
    steps = story_of(run).steps()
    assert len(steps) >= 6
    assert all(step["abs_delta"] <= 1e-4 for step in steps), "the trainer has the log-probs of the rollout"
