"""Checks of the training and inference engines: against the CPU, against each other, and against themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_checks.frame import Failed, Figures, Place, check
from gpu_checks.workload import EXPERTS, TINY, batch, config_of, nothing, start
from relax_actors.config.lora import LoraSection
from relax_actors.engines.protocols import GenerationRequest, TrainSample, train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.transformers.engine import TransformersEngine

STEPS = 4
SHARP = TINY | {"initializer_range": 0.1}
"""Its log-probs are far apart, as a trained model's are."""
LIMITS = {"float32": 2e-4, "bfloat16": 3e-2, "float16": 1e-2}
"""Largest relative difference of a step's loss and gradient norm from the CPU's in float32."""
LOGPROB_LIMITS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest mean difference between the log-probs of two engines, in nats."""


def trained(place: Place, name: str, device: str, model: dict[str, Any], **trainer: Any) -> list[dict[str, float]]:
    """Return the metrics of a few steps."""
    engine = start(config_of(place.folder / name, model, device, **trainer))
    return [dict(train(engine, batch(step), step, nothing).metrics) for step in range(STEPS)]


def steps(place: Place, backend: str) -> Figures:
    """Compare steps on the device with the torch engine's on the CPU in float32.

    Raises:
        Failed: a loss or gradient norm differs.
    """
    expected = trained(place, "cpu", "cpu", TINY)
    figures: Figures = {}
    for precision, limit in LIMITS.items():
        found = trained(
            place, precision, place.device if backend == "torch" else "auto", TINY, backend=backend, precision=precision
        )
        for key in ("loss", "grad_norm"):
            scale = max(abs(one[key]) for one in expected)
            sides = [np.array([one[key] for one in side]) for side in (found, expected)]
            worst = float(np.abs(sides[0] - sides[1]).max()) / scale  # NaN if one is
            figures[f"{key}_difference_{precision}"] = worst
            if not worst < limit:
                sizes = [[round(one[key], 5) for one in side] for side in (found, expected)]
                msg = f"{precision}: {key} differs by {worst:.2e} of its size: {sizes[0]}, on the CPU {sizes[1]}"
                raise Failed(msg)
    return figures


@check("steps_torch", seconds=240)
def steps_torch(place: Place) -> Figures:
    """Steps of the torch engine equal those of the CPU, in every precision."""
    return steps(place, "torch")


@check("steps_megatron", seconds=240)
def steps_megatron(place: Place) -> Figures:
    """Steps of the Megatron-Core engine equal those of the torch engine on the CPU, in every precision."""
    return steps(place, "megatron")


@check("steps_adapter", seconds=240)
def steps_adapter(place: Place) -> Figures:
    """Steps that train an adapter, on the device and with Megatron-Core, equal those of the torch engine on the CPU."""
    base, figures, found = place.folder / "exported", Figures(), {}
    start(config_of(place.folder / "base", TINY, "cpu")).export(base)
    for name, device in (("cpu", "cpu"), ("torch", place.device), ("megatron", "auto")):
        config = config_of(place.folder / name, TINY, device, backend="torch" if name == "cpu" else name)
        model = config.model.model_copy(update={"path": base, "architecture": None})
        engine = start(config.model_copy(update={"model": model, "lora": LoraSection(rank=8)}))
        found[name] = [dict(train(engine, batch(step), step, nothing).metrics) for step in range(STEPS)]
    for name in ("torch", "megatron"):
        for key in ("loss", "grad_norm"):
            sides = [np.array([step[key] for step in found[side]]) for side in (name, "cpu")]
            worst = float(np.abs(sides[0] - sides[1]).max() / np.abs(sides[1]).max())
            figures[f"{key}_difference_{name}"] = worst
            if not worst < LIMITS["float32"]:
                msg = f"{name}: {key} of an adapter differs by {worst:.2e} of its size from the CPU's"
                raise Failed(msg)
    return figures


@check("ranks_torch", seconds=240)
def ranks_torch(place: Place) -> Figures:
    """Steps of one rank that offloads its model (FSDP2) equal those of a whole model on the device."""
    place.require_gpu()  # tests compare ranks on CPUs
    figures: Figures = {}
    for precision, limit in LIMITS.items():
        sides = []
        for name, offload in (("whole", False), ("shared", True)):
            torch.cuda.reset_peak_memory_stats()
            folder, section = f"{name}-{precision}", {"offload": offload}
            sides.append(trained(place, folder, place.device, TINY, precision=precision, torch=section))
            figures[f"{name}_peak_mib_{precision}"] = torch.cuda.max_memory_allocated() / 2**20
        for key in ("loss", "grad_norm"):
            one, other = (np.array([step[key] for step in side]) for side in sides)
            worst = float(np.abs(one - other).max() / np.abs(one).max())  # NaN stays NaN
            figures[f"{key}_difference_{precision}"] = worst
            if not worst < limit:
                msg = f"{precision}: {key} of a shared model differs by {worst:.2e} of its size"
                raise Failed(msg)
    return figures


@check("replay_ranks_torch", seconds=240)
def replay_ranks_torch(place: Place) -> Figures:
    """Steps after a checkpoint of a rank that shares and offloads its model give the same bits again."""
    place.require_gpu()
    return replays(place, "torch", torch={"offload": True})


def replay(place: Place, model: dict[str, Any], **trainer: Any) -> Figures:
    """Take steps, and take them again from a checkpoint in the middle, in a new engine; the bits must be the same.

    Raises:
        Failed: they are not.
    """
    config = config_of(
        place.folder / "run", model, place.device if trainer["backend"] == "torch" else "auto", **trainer
    )
    first, checkpoint = start(config), place.folder / "checkpoint"
    for step in range(STEPS):
        if step == STEPS // 2:
            checkpoint.mkdir()
            first.save(checkpoint)
        train(first, work_of(place, step), step, nothing)
    again = start(config, initialise=False)
    again.load(checkpoint)
    for step in range(STEPS // 2, STEPS):
        train(again, work_of(place, step), step, nothing)
    if (kept := first.fingerprint()) != (found := again.fingerprint()):
        msg = f"{kept} without and {found} with a checkpoint in between"
        raise Failed(msg)
    return {"fingerprint": kept}


def work_of(place: Place, seed: int) -> list[TrainSample]:
    """Return sequences of several blocks of the attention kernels; of one in the short check."""
    return batch(seed) if place.is_short else batch(seed, groups=2, prompt=100, completion=700)


def replays(place: Place, backend: str, **trainer: Any) -> Figures:
    """Replay a dense model and one with experts, in every precision; a line for each that differs."""
    figures, wrong = Figures(), []
    for name, model in (("dense", TINY), ("experts", EXPERTS)):
        for precision in LIMITS:
            of = Place(place.device, place.is_short, place.folder / f"{name}-{precision}")
            of.folder.mkdir()
            try:
                replay(of, model, backend=backend, precision=precision, **trainer)
            except Failed as error:
                wrong.append(f"{name}, {precision}: {error}")
            else:
                figures[f"{name}_{precision}"] = "equal"
    if wrong:
        raise Failed("\n".join(wrong))
    return figures


@check("replay_torch", seconds=240)
def replay_torch(place: Place) -> Figures:
    """Steps after a checkpoint of the torch engine give the same bits again."""
    return replays(place, "torch")


@check("replay_megatron", seconds=240)
def replay_megatron(place: Place) -> Figures:
    """Steps after a checkpoint of the Megatron-Core engine give the same bits again."""
    return replays(place, "megatron")


@check("generation", seconds=240)
def generation(place: Place) -> Figures:
    """Sampled tokens have the log-probs that the trainer computes, and come again for the same seed."""
    figures: Figures = {}
    prompts = np.random.default_rng(0).integers(0, 500, (4, 12)).astype(np.int32)
    for precision, limit in LOGPROB_LIMITS.items():
        config = config_of(place.folder / precision, TINY, place.device, precision=precision)
        trainer = TorchEngine(config)
        trainer.initialise(1)
        trainer.finish_warm_start()
        engine = served(trainer, config.model_path, place, getattr(torch, precision))
        requests = [
            GenerationRequest(prompt, seed, 4, 1.0, 1.0, 32, frozenset()) for seed, prompt in enumerate(prompts)
        ]
        groups, again = (engine.generate(requests, nothing) for _ in range(2))
        tokens = [[sample.tokens.tolist() for sample in group] for group in groups]
        if tokens != [[sample.tokens.tolist() for sample in group] for group in again]:
            msg = f"{precision}: other tokens for the same seed"
            raise Failed(msg)
        pairs = [(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group]
        scored = trainer.score([TrainSample.of_completion(p, s.tokens) for p, s in pairs], nothing)
        ours = [logprobs[len(prompts[0]) :] for logprobs in scored]
        difference = np.concatenate([np.abs(a - s.logprobs) for a, (_, s) in zip(ours, pairs, strict=True)])
        figures |= {
            f"mean_difference_{precision}": float(difference.mean()),
            f"largest_{precision}": float(difference.max()),
        }
        if not difference.mean() < limit:
            msg = f"{precision}: log-probs differ by {difference.mean():.2e} in the mean"
            raise Failed(msg)
    return figures


@check("fp32_lm_head", seconds=120)
def fp32_lm_head(place: Place) -> Figures:
    """Log-probs in bfloat16 come nearer to those in float32 with logits in float32, in both training engines."""
    work, figures = batch(0), Figures()
    expected = np.concatenate(start(config_of(place.folder / "float32", SHARP, "cpu")).score(work, nothing))
    for backend in ("torch", "megatron"):
        device = place.device if backend == "torch" else "auto"
        config = config_of(place.folder / backend, SHARP, device, backend=backend, precision="bfloat16")
        found = {}
        for wide in (False, True):
            model = config.model.model_copy(update={"fp32_lm_head": wide})
            scored = start(config.model_copy(update={"model": model})).score(work, nothing)
            found[wide] = float(np.abs(np.concatenate(scored) - expected).mean())
            figures[f"mean_difference_{backend}{'_fp32_lm_head' if wide else ''}"] = found[wide]
        if not found[True] < found[False]:
            msg = f"{backend}: log-probs differ by {found[True]:.2e} with logits in float32, {found[False]:.2e} without"
            raise Failed(msg)
    return figures


def served(trainer: TorchEngine, model: Path, place: Place, dtype: torch.dtype) -> TransformersEngine:
    """Return the inference engine with the trainer's weights, which went through a file."""
    file = place.folder / f"{dtype}.safetensors"
    print_of = trainer.publish(file)
    engine = TransformersEngine(model, place.device, dtype)
    engine.load(0, print_of, [file])
    return engine
