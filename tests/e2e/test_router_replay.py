"""Router replay in whole runs: recorded experts are in the table, and a model with experts learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from relax_actors.engines.megatron import installation
from relax_actors.errors import ConfigError
from relax_actors.messages import Trajectory
from relax_actors.messages.experts import invalid_reason
from tests.support.kills import fetched
from tests.support.running import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "demo" / "moe.toml"
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
REPLAYED = (*(f"model.architecture.{name}={value}" for name, value in EXPERTS.items()), "trainer.router_replay=true")
ALGORITHM = ("algorithm.proximal=actor_fwd", "algorithm.kl.place=loss", "algorithm.kl.coefficient=0.01")


def skip_without(backend: str) -> None:
    if backend == "megatron":
        try:
            installation.require()
        except ConfigError as error:
            pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_run_records_and_replays_the_experts_of_its_rollouts(make_run: Callable[..., Run], backend: str) -> None:
    skip_without(backend)
    backends = [f"{where}.backend={backend}" for where in ("trainer", "roles.actor_fwd", "roles.reference")]
    settings = (*REPLAYED, *ALGORITHM, *backends, "trainer.checkpoint_every=100")
    run = make_run("moe", *settings).start()
    found = fetched(run, "group.1.0.trajectory", Trajectory)
    assert found.routed_experts.shape == (found.lengths.sum(), 2, 2)
    assert found.prompt_experts.shape == (1, len(found.prompt_tokens) - 1, 2, 2)
    assert found.routed_experts.dtype == np.uint8
    assert invalid_reason(found.routed_experts.astype(np.int16), 4) == ""
    run.disconnect()
    code, result, said = run.finish()
    assert code == 0, said
    assert (result["trained"], result["quarantined"]) == (32, 0)
    assert (result["dropped"], result["in_flight"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_model_with_experts_learns_to_sort(make_run: Callable[..., Run], backend: str) -> None:
    skip_without(backend)
    settings = ("run.steps=240", "eval.every=0", "trainer.checkpoint_every=120", f"trainer.backend={backend}")
    result = make_run("moe", *settings, config=EXAMPLE).complete(500)
    assert result["quarantined"] == 0
    assert result["eval_last"] > result["eval_first"] + 0.1
