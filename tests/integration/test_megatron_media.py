"""Two Megatron-Core ranks train models with media as the torch engine does, at every kind of parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.config import Config
from relax_actors.engines.protocols import train
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.engines.torch.engine import TorchEngine
from tests.support.batches import silent
from tests.support.media_batches import media_batch
from tests.support.tiny_megatron import config_of, media_architecture, ranks_of, skip_if_missing
from tests.support.trained_engines import max_difference, started, weights_of

skip_if_missing()

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 not before the check

SHARED_SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("qwen3_vl", {"tensor_parallel": 2}),
    "pp2": ("qwen3_vl", {"pipeline_parallel": 2}),
    "dp2": ("qwen2_5_omni_thinker", {}),
    "tp2_qwen2_audio": ("qwen2_audio", {"tensor_parallel": 2}),
    "tp2_qwen2_5_vl": ("qwen2_5_vl", {"tensor_parallel": 2}),
    "tp2_sp_qwen3_omni": ("qwen3_omni_moe_thinker", SHARED_SEQUENCE),
    "tp2_sp_recompute": ("qwen3_vl_moe", SHARED_SEQUENCE | {"recompute": "full"}),
    "pp2_qwen2_5_vl": ("qwen2_5_vl", {"pipeline_parallel": 2}),
    "pp2_vpp2": ("qwen3_vl", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "dp2_plain": ("qwen3_vl", {"distributed_optimizer": False}),
    "ep2": ("qwen3_vl_moe", {"expert_parallel": 2}),
    "cp2": ("qwen3_omni_moe_thinker", {"context_parallel": 2, "recompute": "full"}),
    "cp2_qwen2_audio": ("qwen2_audio", {"context_parallel": 2}),
    "pp2_internvl": ("internvl", {"pipeline_parallel": 2}),
    "tp2_pp2": ("qwen3_vl", {"ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True}),
}
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "cp2": ("qwen3_vl", {"context_parallel": 2}),
    "pp2": ("qwen2_5_omni_thinker", {"pipeline_parallel": 2, "recompute": "full"}),
    "dp2_tp2": ("qwen3_vl", {"ranks": 4, "tensor_parallel": 2}),
    "dp2_pp2": ("qwen3_vl", {"ranks": 4, "pipeline_parallel": 2}),
}
"""Layouts whose ranks are compared with ranks that do not share the towers."""
UNUSED = "audio_tower.audio_bos_eos_token.weight"
"""Weight of Qwen2.5-Omni that its model never reads."""


def configured(folder: Path, case: tuple[str, dict[str, Any]], ranks: int = 2) -> Config:
    model_type, section = case
    # An update of AdamW is learning_rate * g / (|g| + epsilon), so that weights differ as gradients do.
    settings = {"learning_rate": 1.0, "epsilon": 1.0, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 120}
    algorithm = {"kl": {"place": "loss", "coefficient": 0.1}}
    layout = ranks_of(section, ranks) if ranks > 1 else {}
    architecture = media_architecture(model_type)
    return config_of(folder, architecture, algorithm=algorithm, trainer=settings | layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_media_as_the_torch_engine_and_any_layout_goes_on(
    tmp_path: Path, group_of: Callable[[Config], TrainerGroup], name: str
) -> None:
    config = configured(tmp_path / "run", CASES[name])
    group, alone, samples = started(group_of(config)), started(TorchEngine(config)), media_batch(config)
    assert group.fingerprint() == alone.fingerprint()
    for ours, theirs in zip(group.score(samples, silent), alone.score(samples, silent), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    rows = [samples[begin : begin + 2] for begin in range(0, len(samples), 2)]
    for step, parts in enumerate(([samples], rows)):  # the whole step at once, then row by row as it streams in
        for engine in (group, alone):
            for part in parts:
                engine.accumulate(part, silent)
        found, expected = group.step(step, silent).metrics, alone.step(step, silent).metrics
        for metric in ("loss", "kl", "grad_norm", "ratio_p99", "tokens"):
            assert found[metric] == pytest.approx(expected[metric], abs=1e-5, rel=1e-4), metric
    assert max_difference(weights_of(group, tmp_path / "a"), weights_of(alone, tmp_path / "b")) < 1e-4
    (folder := tmp_path / "checkpoint").mkdir()
    group.save(folder)
    fingerprint = group.fingerprint()
    metrics = train(group, samples, 2, silent).metrics
    after = group.fingerprint()
    group.load(folder)
    assert group.fingerprint() == fingerprint
    assert train(group, samples, 2, silent).metrics == metrics
    assert group.fingerprint() == after
    if name != "ep2":  # the optimizer state of the experts is separate in it
        other = MegatronEngine(configured(tmp_path / "run", CASES[name], ranks=1))
        other.load(folder)
        assert other.fingerprint() == fingerprint
        assert train(other, samples, 2, silent).metrics["loss"] == pytest.approx(metrics["loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_the_towers_train_what_each_alone_would_and_replay_their_bits(
    tmp_path: Path, group_of: Callable[[Config], TrainerGroup], name: str
) -> None:
    config = configured(tmp_path / "run", SHARED[name])
    own = config.trainer.megatron.model_copy(update={"share_towers": False})
    alone = config.model_copy(update={"trainer": config.trainer.model_copy(update={"megatron": own})})
    shared, samples = started(group_of(config)), media_batch(config)
    if name.startswith("dp2"):  # one of the two replicas has no media
        samples = [*samples[:2], *samples[4:]]
    before = weights_of(shared, tmp_path / "before")
    metrics = train(shared, samples, 0, silent).metrics
    after, fingerprint = weights_of(shared, tmp_path / "after"), shared.fingerprint()
    other = started(group_of(alone))
    assert train(other, samples, 0, silent).metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    expected = weights_of(other, tmp_path / "expected")
    for weight, tensor in expected.items():
        step = (tensor - before[weight]).abs().max()
        # Updates are gradients here. Sums in another order differ in the last bits of weights and gradients.
        assert (after[weight] - tensor).abs().max() <= 1e-5 * max(step, tensor.abs().max()), weight
        assert step or weight.endswith(UNUSED), f"{weight} is not trained"
    reports: list[list[str]] = [[], []]
    # Copies of the towers have the weights of the step before, those of the reference the first ones.
    both = [
        train(group, samples, 1, partial(found.append, "")).metrics
        for group, found in zip((shared, other), reports, strict=True)
    ]
    assert both[0] == pytest.approx(both[1], rel=1e-4, abs=1e-5)
    left = [group.release_memory(tmp_path / "away") for group in (shared, other)]
    if "pipeline_parallel" in SHARED[name][1]:
        assert len(reports[0]) > len(reports[1])  # for media that are encoded ahead, too
        towers = sum(tensor.nbytes for weight, tensor in before.items() if "visual." in weight or "audio" in weight)
        assert left[0] - left[1] >= 2 * towers  # the copies of model and reference leave the device
    shared.resume_memory()
    started(shared)
    assert train(shared, samples, 0, silent).metrics == metrics
    assert shared.fingerprint() == fingerprint
