"""Training for weights of few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from relax_actors.checks.examine import examine
from relax_actors.config import load_config
from relax_actors.engines.protocols import train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.fake_quant import on_grid
from relax_actors.engines.torch.model import tensors_of
from relax_actors.engines.torch.stored_weights import fingerprint_of
from relax_actors.errors import ConfigError
from relax_actors.weights import files as weights
from tests.support.batches import batch_of, silent
from tests.support.models import QWEN3, config_of
from tests.support.running import TINY
from tests.support.torch_ranks import ranks_config, ranks_of, trained
from tests.support.trained_engines import started, weights_of

GROUP = 16


@given(seed=st.integers(0, 2**31), bits=st.sampled_from([4, 8]), scale=st.floats(1e-6, 1e6))
@settings(max_examples=50, deadline=None)
def test_grid_has_few_points_near_the_weights_and_keeps_what_is_on_it(seed: int, bits: int, scale: float) -> None:
    weight = torch.randn((3, 4 * GROUP), generator=torch.Generator().manual_seed(seed)) * scale
    weight[0, :GROUP] = 0
    found, most = on_grid(weight, bits, GROUP), 2 ** (bits - 1) - 1
    groups, steps = found.unflatten(-1, (-1, GROUP)), weight.unflatten(-1, (-1, GROUP)).abs().amax(-1) / most
    assert max(len(group.unique()) for row in groups for group in row) <= 2 * most + 1
    # Half a step, and what rounding the scale to 8 bits adds at the ends.
    error = (found - weight).unflatten(-1, (-1, GROUP)).abs().amax(-1)
    assert bool((error <= steps * (0.5 + most * 2.0**-8) + 1e-30).all())
    assert torch.equal(on_grid(found, bits, GROUP), found)
    assert not found[0, :GROUP].any()


def engine_of(folder: Path, ranks: int = 1, **trainer: Any) -> Any:
    return ranks_config(folder, QWEN3, ranks, fake_quant={"group": GROUP}, **trainer)


def is_on_grid(published: dict[str, Tensor]) -> bool:
    chosen = {name: t.float() for name, t in published.items() if name.endswith("_proj.weight")}
    assert len(chosen) == 7 * QWEN3["num_hidden_layers"]
    return all(torch.equal(on_grid(t, 4, GROUP), t) for t in chosen.values())


def test_published_weights_are_on_the_grid_and_small_steps_add_up(tmp_path: Path) -> None:
    engine = started(TorchEngine(engine_of(tmp_path, learning_rate=1e-4, max_tokens_per_microbatch=512)))
    first = weights_of(engine, tmp_path / "0")
    assert is_on_grid(first)
    changed = []
    for step in range(6):
        train(engine, batch_of(1), step, silent)
        now = weights_of(engine, tmp_path / "1")
        assert is_on_grid(now)
        changed.append(sum(int((now[n] != first[n]).sum()) for n in now if n.endswith("_proj.weight")))
    assert changed[-1] > 2 * changed[0]  # a step alone moves few weights to the next point
    engine.export(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert weights.fingerprint(tensors_of(loaded)) == engine.fingerprint()


def test_training_on_the_grid_resumes_from_a_checkpoint_exactly(tmp_path: Path) -> None:
    config = engine_of(tmp_path, precision="bfloat16", max_tokens_per_microbatch=512)
    one = started(TorchEngine(config))
    trained(one, range(2))
    (folder := tmp_path / "checkpoint").mkdir()
    one.save(folder)
    assert fingerprint_of(folder) == one.fingerprint()
    other = TorchEngine(config)
    other.load(folder)
    assert trained(one, range(2, 5)) == trained(other, range(2, 5))
    assert one.fingerprint() == other.fingerprint()
    away = one.release_memory(tmp_path / "away")
    assert away == one.resume_memory() > 0


@pytest.mark.slow
def test_two_ranks_train_on_the_grid_what_one_process_does(tmp_path: Path) -> None:
    both = []
    for ranks in (1, 2):
        with ranks_of(engine_of(tmp_path, ranks)) as engine:
            metrics = trained(started(engine))
            both.append((metrics, weights_of(engine, tmp_path / f"{ranks}")))
            (folder := tmp_path / f"checkpoint{ranks}").mkdir()
            engine.save(folder)
            engine.load(folder)
            assert fingerprint_of(folder) == engine.fingerprint()
    for one, two in zip(both[0][0], both[1][0], strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-3, abs=1e-5)
    assert is_on_grid(both[1][1])
    # Rounding may take a weight to the point of the grid beside, and few do.
    moved = sum(int((both[0][1][n] != both[1][1][n]).sum()) for n in both[0][1] if n.endswith("_proj.weight"))
    assert moved < 0.01 * sum(t.numel() for n, t in both[0][1].items() if n.endswith("_proj.weight"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"group": 24}, r"groups of 24 do not divide its inputs; set trainer.fake_quant.group"),
        ({"group": 16, "weights": ["*.gate"]}, r"'\*.gate' matches no weight of the model"),
        ({"group": 16, "weights": ["*norm.weight"]}, r"norm.weight has the shape \(\d+,\)"),
    ],
)
def test_weights_without_a_grid_are_refused(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchEngine(config_of(tmp_path, QWEN3, trainer={"fake_quant": section}))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("trainer.backend=megatron", "megatron"),
        ("lora.rank=4", "an adapter is not trained for few bits"),
    ],
)
def test_engines_without_a_grid_are_refused(more: str, message: str) -> None:
    errors = examine(load_config(TINY, ["trainer.fake_quant.bits=4", more])).errors
    assert any(message in error for error in errors)
