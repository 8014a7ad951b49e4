"""The files of examples/cluster train: with a tiny model of the same class, on the CPUs of two nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import sglang_servers
from tests.support.cluster_examples import FOLDER, write_inputs
from tests.support.faults import story_of
from tests.support.guarded import MakeGuarded
from tests.support.nodes import Node
from tests.support.running import Run
from tests.support.tiny_megatron import skip_if_missing

skip_if_missing()

SMALL = (
    "run.steps=3",
    "rollout.replicas=1",
    "rollout.group_size=4",
    "rollout.max_tokens=8",
    "rollout.deadline=300",
    "reward.replicas=1",
    "trainer.prompts_per_step=2",
    "trainer.precision=float32",
    "trainer.megatron.ranks=2",
    "trainer.megatron.local_ranks=1",
    "trainer.megatron.tensor_parallel=2",
    "supervision.heartbeat=30",
    "supervision.start_deadline=400",
)
MEDIA = (
    "media.replicas=1",
    "trainer.megatron.pipeline_parallel=1",
    "trainer.megatron.expert_parallel=2",
    "rollout.sglang.tensor_parallel=1",
)
MORE = {
    "qwen3_4b_async": ("algorithm.shaping.filter_zero_variance=false",),
    "qwen3_vl_30b_deepeyes": (*MEDIA, "environment.replicas=1", "environment.sessions=16"),
    "qwen3_omni_30b": MEDIA,
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", MORE)
def test_example_trains_a_tiny_model_on_two_nodes(
    name: str,
    tmp_path: Path,
    make_run: Callable[..., Run],
    make_guarded: MakeGuarded,
    nodes: Callable[..., Node],
) -> None:
    sglang_servers.skip_if_missing()
    settings = [*SMALL, *MORE[name], *write_inputs(tmp_path, name, tiny=True)]
    guarded = make_guarded([f"run.name={name}", *settings], FOLDER / f"{name}.toml")
    guarded.make()
    guarded.start()
    broker = [f"broker.url=nats://127.0.0.1:{guarded.port}", f"broker.credentials={guarded.keys}"]
    run = make_run(name, *settings, *broker, config=FOLDER / f"{name}.toml").start()
    second = nodes(guarded, run, "second", "trainer_rank", "rollout")
    code, result, said = run.finish(1000)
    assert code == 0, said
    assert (result["steps"], result["quarantined"], result["dropped"], result["in_flight"]) == (3, 0, 0, 0)
    steps = story_of(run).steps()
    assert all(step["abs_delta"] <= 1e-4 for step in steps), "the trainer has the log-probs of the rollout"
    assert second.end()[0] == 0
