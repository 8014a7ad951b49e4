"""Router replay in Megatron-Core matches the torch engine in forward, recomputation and backward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.engines.protocols import train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.errors import ConfigError
from tests.support.batches import batch_of, routed, silent
from tests.support.tiny_megatron import DENSE, MOE, config_of, skip_if_missing
from tests.support.trained_engines import max_difference, started, weights_of

skip_if_missing()

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 after the check


def engine_of(tmp_path: Path, architecture: dict[str, Any] = MOE, **trainer: Any) -> MegatronEngine:
    settings = {"learning_rate": 1e-3, "router_replay": True, **trainer}
    return started(MegatronEngine(config_of(tmp_path, architecture, trainer=settings)))


@pytest.mark.parametrize("renormalised", [True, False])
def test_five_replayed_steps_match_torch_engine(tmp_path: Path, *, renormalised: bool) -> None:
    architecture = MOE | {"norm_topk_prob": renormalised}
    algorithm = {"kl": {"place": "loss", "coefficient": 0.1}}  # the reference chooses its own experts
    settings = {"learning_rate": 1e-3, "router_replay": True}
    config = config_of(tmp_path, architecture, trainer=settings, algorithm=algorithm)
    megatron, beside = started(MegatronEngine(config)), started(TorchEngine(config))
    plain = started(MegatronEngine(config))
    for step in range(5):
        batch = routed(batch_of(step), step, MOE)
        ours, theirs = train(megatron, batch, step, silent).metrics, train(beside, batch, step, silent).metrics
        train(plain, batch_of(step), step, silent)
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5 if name != "grad_norm" else 1e-4), name
        assert {"unreplayed_abs_delta", "unreplayed_k3", "unreplayed_rerouted"} <= ours.keys() or step > 0
        assert ours["rerouted"] > 0.5
    found = [weights_of(engine, tmp_path / str(n)) for n, engine in enumerate((megatron, beside, plain))]
    assert max_difference(found[0], found[1]) < 5e-5
    assert max_difference(found[0], found[2]) > 1e-3


@pytest.mark.parametrize("token_budget", [20, 10_000])
def test_recomputed_activations_use_same_experts(tmp_path: Path, token_budget: int) -> None:
    found = []
    for recompute in ("none", "selective", "full"):
        engine = engine_of(tmp_path, max_tokens_per_microbatch=token_budget, recompute=recompute)
        for step in range(2):
            measured = train(engine, routed(batch_of(step), step, MOE), step, silent).metrics
        found.append((engine.fingerprint(), measured["rerouted"]))
    assert found[0] == found[1] == found[2]


def test_only_replayed_experts_and_router_are_trained(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    before = weights_of(engine, tmp_path / "before")
    batch = batch_of(0)
    # The last token of a sequence has no recorded experts, and no loss depends on it.
    chosen = [np.broadcast_to(np.array([3, 1], np.int16), (len(sample) - 1, 4, 2)).copy() for sample in batch]
    forced = [replace(sample, routed_experts=experts) for sample, experts in zip(batch, chosen, strict=True)]
    train(engine, forced, 0, silent)
    after = weights_of(engine, tmp_path / "after")
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts.down_proj"
        of_experts = [bool(one.any()) for one in after[experts] != before[experts]]
        assert of_experts == [False, True, False, True]
        gate = f"model.layers.{layer}.mlp.gate.weight"
        assert bool((after[gate] != before[gate]).any())


def test_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="router_replay = true, but the model has no experts"):
        engine_of(tmp_path, DENSE)


def test_missing_recorded_experts_change_nothing(tmp_path: Path) -> None:
    """No recorded experts, only missing experts, and no replay at all give the same weights."""
    found = []
    for replays, missing in ((True, None), (True, 1.0), (False, None)):
        engine = engine_of(tmp_path, router_replay=replays)
        batch = batch_of(0) if missing is None else routed(batch_of(0), 0, MOE, missing)
        measured = train(engine, batch, 0, silent).metrics
        assert "rerouted" not in measured
        found.append(engine.fingerprint())
    assert found[0] == found[1] == found[2]
