"""Ranks of the torch engine that share a base and train an adapter of it train what one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from relax_actors.config import Config
from relax_actors.config.training import CriticSection, TorchSection
from relax_actors.engines.ranks.group import CriticGroup
from relax_actors.engines.torch.critic import TorchCritic
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.weights import files as weights
from tests.conformance.base.critic_engine import updated
from tests.conformance.base.training_engine import begun, folder_of
from tests.support.adapters import adapter_config, base_folder
from tests.support.batches import batch_of, silent
from tests.support.models import QWEN3, qwen3_moe
from tests.support.torch_ranks import ranks_of, trained
from tests.support.trained_engines import max_difference, weights_of

LIMIT = 1e-5
KL = {"kl": {"place": "loss", "coefficient": 0.1}}
# The same moments of AdamW, but updates that are as far apart as gradients are.
SMOOTH = {"learning_rate": 1e-2, "epsilon": 1e-3, "max_tokens_per_microbatch": 40}
FORMS: dict[str, dict[str, Any]] = {
    "adapter": {},
    "with a norm": {"modules_to_save": ["norm"], "targets": ["q_proj", "down_proj"], "export_merged": True},
    "experts": {"targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"], "export_merged": True},
}
Result = tuple[list[dict[str, float]], dict[str, Tensor], list[Any], dict[str, Tensor]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("experts"), qwen3_moe(QWEN3))


def config_of(folder: Path, base: Path, ranks: int, form: dict[str, Any], *, offload: bool = False) -> Config:
    """Configure a run that trains an adapter on some ranks."""
    trainer = {**SMOOTH, "torch": {"ranks": ranks, "offload": offload}}
    return adapter_config(folder, base, form, trainer=trainer, algorithm=KL)


def result_of(engine: Any, folder: Path) -> Result:
    """Take steps, go on from a checkpoint, and return metrics, weights, log-probs and what the run exports."""
    metrics = trained(begun(engine), range(2))
    engine.save(saved := folder_of(folder / "checkpoint"))
    at = engine.fingerprint()
    went_on = trained(engine, range(2, 4))
    last = engine.fingerprint()
    engine.load(saved)
    assert engine.fingerprint() == at
    assert trained(engine, range(2, 4)) == went_on
    assert engine.fingerprint() == last
    engine.export(exported := folder_of(folder / "model"))
    written = weights.load(sorted(exported.rglob("*.safetensors")))
    return metrics + went_on, weights_of(engine, folder / "version"), engine.score(batch_of(9), silent), written


def assert_close(one: Result, other: Result) -> None:
    """Compare what two engines measured and trained; micro-batches are counted for each rank."""
    for ours, theirs in zip(one[0], other[0], strict=True):
        ours.pop("micro_batches")
        theirs.pop("micro_batches")
        assert ours == pytest.approx(theirs, rel=LIMIT, abs=LIMIT)
    assert max_difference(one[1], other[1]) < LIMIT
    assert max_difference(one[3], other[3]) < LIMIT
    for mine, theirs_scored in zip(one[2], other[2], strict=True):
        np.testing.assert_allclose(mine, theirs_scored, rtol=1e-4, atol=LIMIT)


@pytest.mark.parametrize("form", FORMS)
def test_adapter_over_an_offloaded_base_is_the_adapter_over_a_whole_one(
    tmp_path: Path, base: Path, with_experts: Path, form: str
) -> None:
    results, base = [], with_experts if form == "experts" else base
    for offload in (False, True):
        config = config_of(tmp_path / f"{offload}", base, 1, FORMS[form], offload=offload)
        with ranks_of(config) as engine:
            results.append(result_of(engine, folder_of(tmp_path / f"result{offload}")))
    assert results[0][0][0]["kl"] == pytest.approx(0, abs=1e-6)
    assert results[0][0][3]["kl"] > 1e-4
    assert_close(results[1], results[0])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_train_the_adapter_of_one_process(tmp_path: Path, base: Path, with_experts: Path, form: str) -> None:
    results, base = [], with_experts if form == "experts" else base
    for ranks in (1, 2):
        with ranks_of(config_of(tmp_path / f"{ranks}", base, ranks, FORMS[form])) as engine:
            results.append(result_of(engine, folder_of(tmp_path / f"result{ranks}")))
    assert_close(results[1], results[0])


def trained_critic(config: Config, ranks: int, folder: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train a critic with an adapter of its own, and return its metrics and what it exports."""
    settings = CriticSection(learning_rate=1e-2, value_clip=0.05, torch=TorchSection(ranks=ranks, offload=ranks == 1))
    config = config.model_copy(update={"critic": settings})
    begun(TorchEngine(config)).publish(policy := folder / "policy.safetensors")
    critic: Any = TorchCritic(config, settings) if ranks < 2 else CriticGroup(config, lambda *_: None)
    try:
        critic.initialise([policy])
        metrics = [dict(updated(critic, step)) for step in range(2)]
        critic.save(saved := folder_of(folder / "checkpoint"))
        kept = critic.fingerprint()
        updated(critic, 2)
        critic.load(saved)
        assert critic.fingerprint() == kept
        critic.export(exported := folder / "critic")
        return metrics, weights.load(sorted(exported.glob("*.safetensors")))
    finally:
        if ranks > 1:
            critic.close()


@pytest.mark.slow
def test_two_ranks_of_a_critic_train_the_adapter_of_one_process(tmp_path: Path, base: Path) -> None:
    config = config_of(tmp_path / "run", base, 1, {})
    results = [trained_critic(config, ranks, folder_of(tmp_path / f"{ranks}")) for ranks in (1, 2)]
    for ours, theirs in zip(results[1][0], results[0][0], strict=True):
        del ours["micro_batches"], theirs["micro_batches"]
        assert ours == pytest.approx(theirs, rel=LIMIT, abs=LIMIT)
    assert max_difference(results[1][1], results[0][1]) < LIMIT
