"""Checks of models other than a policy that reads text: a critic, towers, and experts that a rollout chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from r3 import generated_batch
from towers import architecture, batch_of
from training_workload import MOE, start_engine
from training_workload import config_of as benchmark_config

from gpu_checks.engines import LIMITS
from gpu_checks.frame import Failed, Figures, Place, check
from gpu_checks.workload import TINY, batch, config_of, nothing, start
from relax_actors.config.training import CriticSection
from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.torch.critic import TorchCritic
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.transformers.engine import TransformersEngine

STEPS = 3
SIDES = ("torch", "megatron")


def compare(
    expected: Sequence[dict[str, float]],
    found: Sequence[dict[str, float]],
    limit: float,
    name: str,
    keys: Sequence[str] = ("loss", "grad_norm"),
) -> Figures:
    """Return the largest difference of some metrics, each relative to its largest value on the CPU.

    Raises:
        Failed: it is not below the limit.
    """
    figures: Figures = {}
    for key in keys:
        sides = [np.array([step[key] for step in side]) for side in (found, expected)]
        worst = float(np.abs(sides[0] - sides[1]).max() / np.abs(sides[1]).max())  # NaN stays NaN
        figures[f"{key}_difference_{name}"] = worst
        if not worst < limit:
            msg = f"{name}: {key} differs by {worst:.2e} of its size: {sides[0]}, on the CPU {sides[1]}"
            raise Failed(msg)
    return figures


def on_sides(place: Place, trained: Callable[[str, str, str], list[dict[str, float]]]) -> Figures:
    """Compare both training engines with the torch engine on the CPU in float32.

    Args:
        place: of the check.
        trained: returns the metrics of steps with a backend, on a device, in a precision.
    """
    expected, figures = trained("torch", "cpu", "float32"), Figures()
    for backend in SIDES:
        device = place.device if backend == "torch" else "auto"
        for precision in ("float32", "bfloat16"):
            found = trained(backend, device, precision)
            figures |= compare(expected, found, LIMITS[precision], f"{backend}_{precision}")
    return figures


@check("critic", seconds=240)
def critic(place: Place) -> Figures:
    """Updates and values of a torch critic equal those of the CPU."""
    start(config_of(place.folder / "policy", TINY, "cpu")).publish(file := place.folder / "policy.safetensors")
    sides, values = {}, {}
    for device in ("cpu", place.device):
        config = config_of(place.folder / f"on-{device}", TINY, "cpu")
        one = TorchCritic(config, CriticSection(learning_rate=1e-3, device=device))
        one.initialise([file])
        sides[device] = []
        for step in range(STEPS):
            one.accumulate(with_returns(batch(step)), nothing)
            sides[device].append(dict(one.step(step, nothing).metrics))
        values[device] = np.concatenate(one.values(batch(9), nothing))
    figures = compare(sides["cpu"], sides[place.device], LIMITS["float32"], "torch_float32", ("value_loss", "value"))
    figures["largest_difference_of_values"] = worst = float(np.abs(values["cpu"] - values[place.device]).max())
    if not worst < 1e-3:
        msg = f"values differ by {worst:.2e}"
        raise Failed(msg)
    return figures


def with_returns(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """Return sequences with values 0 and random returns."""
    found = []
    for number, sample in enumerate(samples):
        returns = np.random.default_rng(number).standard_normal(len(sample)).astype(np.float32)
        found.append(replace(sample, values=np.zeros_like(returns), returns=returns))
    return found


@check("media", seconds=240)
def media(place: Place) -> Figures:
    """Steps of a model like Qwen3-VL on images equal those of the torch engine on the CPU, in both training engines."""

    def trained(backend: str, device: str, precision: str) -> list[dict[str, float]]:
        config = made(place, architecture(2), backend, device, precision, learning_rate=1e-3)
        engine = start_engine(config)
        samples = batch_of(config.model_path, 4, 64)
        return [dict(train(engine, samples, step, nothing).metrics) for step in range(STEPS)]

    return on_sides(place, trained)


def made(place: Place, model: dict[str, Any], backend: str, device: str, precision: str, **trainer: Any) -> Any:
    """Return the configuration of a run of its own."""
    folder: Path = place.folder / f"{backend}-{device}-{precision}"
    return benchmark_config(folder, model, backend=backend, device=device, precision=precision, **trainer)


@check("router_replay", seconds=240)
def router_replay(place: Place) -> Figures:
    """Steps with the experts that a rollout on the device chose equal those of the CPU, in both training engines."""
    config = made(place, MOE, "torch", "cpu", "float32", router_replay=True)
    trainer = TorchEngine(config)
    trainer.initialise(1)
    trainer.finish_warm_start()
    published = place.folder / "published.safetensors"
    rollout = TransformersEngine(config.model_path, place.device, torch.bfloat16, records_experts=True)
    rollout.load(0, trainer.publish(published), [published])
    work = [generated_batch(rollout, seed) for seed in range(STEPS)]
    del trainer

    def trained(backend: str, device: str, precision: str) -> list[dict[str, float]]:
        engine = start_engine(made(place, MOE, backend, device, precision, router_replay=True, learning_rate=1e-3))
        return [dict(train(engine, samples, step, nothing).metrics) for step, samples in enumerate(work)]

    return on_sides(place, trained)
