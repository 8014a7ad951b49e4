"""Experts that are computed by grouped products train like separate experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from relax_actors.config import Config
from relax_actors.engines.megatron.architecture import architecture_of
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.protocols import train
from tests.support.adapters import adapter_config, base_folder
from tests.support.batches import batch_of, routed, silent
from tests.support.tiny_megatron import MOE, config_of, skip_if_missing
from tests.support.trained_engines import weights_of

skip_if_missing()
if not hasattr(functional, "grouped_mm"):
    pytest.skip("torch has no grouped_mm", allow_module_level=True)

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 after the check
from relax_actors.engines.megatron.mcore.grouped_experts import (  # noqa: E402
    INNER,
    OUTER,
    LastFirst,
    grouped_product,
    joined,
)
from relax_actors.engines.megatron.mcore.model_chunks import ModelChunks  # noqa: E402
from relax_actors.engines.megatron.mcore.optimizer import Optimizer  # noqa: E402

COUNTS = [3, 0, 5, 1]


def spread(step: int, count: int = 4, shape: tuple[int, int] = (8, 12)) -> list[Tensor]:
    """Return matrices that begin at every `step`-th number of a buffer."""
    buffer = torch.randn(step * count, generator=torch.Generator().manual_seed(0))
    return [buffer[n * step :][: shape[0] * shape[1]].view(shape) for n in range(count)]


@pytest.mark.parametrize("step", [96, 128])
def test_product_and_gradients_are_those_of_each_expert(step: int) -> None:
    weights = [weight.requires_grad_() for weight in spread(step)]
    x = torch.randn(sum(COUNTS), 12, generator=torch.Generator().manual_seed(1)).requires_grad_()
    ends = torch.tensor(COUNTS).cumsum(0).int()
    apart = torch.cat([functional.linear(rows, w) for rows, w in zip(torch.split(x, COUNTS), weights, strict=True)])
    upstream = torch.randn(apart.shape, generator=torch.Generator().manual_seed(2))
    together = grouped_product(x, ends, COUNTS, weights)
    ours, theirs = (torch.autograd.grad(one, [x, *weights], upstream) for one in (together, apart))
    for one, other in zip((together, *ours), (apart, *theirs), strict=True):
        assert (one - other).abs().max() <= 1e-5 * apart.abs().max()
    assert not ours[2].any(), "an expert without rows has a gradient of 0"
    weights[0].requires_grad_(False)
    (of_weight,) = torch.autograd.grad(grouped_product(x, ends, COUNTS, weights), [weights[3]], upstream)
    assert torch.equal(of_weight, ours[4])


def test_matrices_at_equal_distances_are_not_copied() -> None:
    for weights in (spread(96), spread(128)):
        view = joined(weights)
        assert view.data_ptr() == weights[0].data_ptr()
        assert torch.equal(view, torch.stack(weights))
    apart = [torch.randn(8, 12) for _ in range(3)]
    for weights in (spread(128)[::-1], [spread(128)[n] for n in (0, 1, 3)], apart, apart[:1]):
        assert torch.equal(joined(weights), torch.stack(weights))


def test_weights_in_the_buffers_of_the_optimizer_are_read_where_they_lie(tmp_path: Path) -> None:
    config = configured(tmp_path, grouped=True)
    MegatronEngine(config)  # creates the process group
    layout = Layout.of(config.trainer.megatron)
    chunks = ModelChunks(config, architecture_of(config.model_path), layout)
    experts = chunks.bare[0].decoder.layers[0].mlp.experts.local_experts
    for _ in ("before", "after the optimizer has moved them"):
        for layer in (INNER, OUTER):
            weights = [getattr(expert, layer).weight for expert in experts]
            assert joined(weights).data_ptr() == weights[0].data_ptr()
        Optimizer(config, chunks)


def test_modules_keep_their_order_whose_parameters_come_from_the_last_one() -> None:
    modules = LastFirst(torch.nn.Linear(1, n + 1) for n in range(3))
    assert [module.out_features for module in modules] == [modules[n].out_features for n in range(3)] == [1, 2, 3]
    assert next(iter(dict(modules.named_parameters()))) == "2.weight"


def configured(folder: Path, *, grouped: bool, **trainer: Any) -> Config:
    megatron = {"grouped_experts": grouped, **trainer.pop("megatron", {})}
    return config_of(folder, MOE, trainer={"learning_rate": 1e-3, "megatron": megatron, **trainer})


def started(config: Config) -> MegatronEngine:
    engine = MegatronEngine(config)
    engine.initialise(5)
    engine.finish_warm_start()
    return engine


@pytest.mark.parametrize(
    "trainer",
    [{}, {"recompute": "full", "router_replay": True}, {"megatron": {"distributed_optimizer": False}}],
    ids=["", "recomputed and replayed", "whole optimizer"],
)
def test_steps_are_those_of_experts_one_by_one_and_repeat_to_the_bit(tmp_path: Path, trainer: dict[str, Any]) -> None:
    engines = [
        started(configured(tmp_path / str(n), grouped=grouped, **trainer))
        for n, grouped in enumerate((False, True, True))
    ]
    for step in range(3):
        batch = routed(batch_of(step), step, MOE) if "router_replay" in trainer else batch_of(step)
        apart, together, again = (train(engine, batch, step, silent).metrics for engine in engines)
        for name in ("loss", "grad_norm"):
            assert together[name] == pytest.approx(apart[name], rel=1e-5, abs=1e-6)
            assert together[name] == again[name]
    assert engines[1].fingerprint() == engines[2].fingerprint()
    ours, theirs = (weights_of(engine, tmp_path / f"w{n}") for n, engine in enumerate(engines[:2]))
    for name, weight in theirs.items():
        assert (ours[name] - weight).abs().max() <= 1e-4 * weight.abs().max(), name


def test_experts_with_adapters_are_computed_one_by_one(tmp_path: Path) -> None:
    base, found = base_folder(tmp_path, MOE), []
    for grouped in (False, True):
        trainer = {"backend": "megatron", "megatron": {"grouped_experts": grouped}}
        lora = {"targets": ["experts.down_proj"]}
        engine = started(adapter_config(tmp_path / str(grouped), base, lora, trainer=trainer))
        train(engine, batch_of(0), 0, silent)
        found.append(engine.fingerprint())
    assert found[0] == found[1]
