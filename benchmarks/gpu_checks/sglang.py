"""Checks of SGLang's server with its own kernels."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from engines import PROMPTS, SAMPLES, Size, seconds, server_of
from engines import config_of as served_config
from precision import distance, requests
from server_weights import compare
from turns import metrics

from gpu_checks.frame import Failed, Figures, Place, Skipped, check, require
from gpu_checks.runs import SHARED, finish, start
from relax_actors.engines.protocols.server import ServerRecord
from relax_actors.engines.sglang.connection import SglangSettings
from relax_actors.engines.sglang.engine import SglangEngine
from relax_actors.engines.sglang.weight_loaders import FileLoader
from relax_actors.engines.torch.engine import TorchEngine

MISMATCH = 20
"""Largest mean distance of log-probs in FP8 from the trainer's, in distances of bfloat16: twice that on a CPU, and less
than that of weights in four bits."""
SERVED = ("rollout.backend=sglang", "rollout.sglang.weights=shared")


def require_kernels(place: Place) -> None:
    """Raise Skipped if SGLang's own kernels are not installed."""
    place.require_gpu()
    require("sglang", "sgl_kernel")
    if find_spec("relax_sglang_cpu") is not None:
        msg = "its kernels for CPUs are installed, not those for GPUs"
        raise Skipped(msg)


@check("server_weights", seconds=300, is_alone=True, is_short=False)
def server_weights(place: Place) -> Figures:
    """Seconds of a weight update of a server of 0.6 B parameters: by file, shared memory and broadcast; own memory."""
    require_kernels(place)
    found = compare(place.folder, Size(1024, 28, 151936, "bfloat16"), 3, place.device)
    return {f"{way}_{key}": value for way, figures in found.items() for key, value in figures.items()}


@check("sglang_fp8", seconds=400, is_alone=True, is_short=False)
def sglang_fp8(place: Place) -> Figures:
    """A server of 0.6 B parameters with weights in bfloat16 and in FP8: tokens a second, and mismatch of log-probs."""
    require_kernels(place)
    size = Size(1024, 28, 151936, "bfloat16")
    figures = {kind: served(place.folder / kind, size, place.device, kind) for kind in ("none", "fp8")}
    rounded, exact = (figures[kind]["abs_delta"] for kind in ("fp8", "none"))
    if not rounded < MISMATCH * exact:
        msg = f"log-probs of the server differ by {rounded:.3g} in FP8, and by {exact:.3g} in bfloat16"
        raise Failed(msg)
    return {f"{key}_{kind}": value for kind, found in figures.items() for key, value in found.items()}


def served(folder: Path, size: Size, device: str, quantization: str, tokens: int = 256) -> dict[str, float]:
    """Return tokens a second of a server after an update, and how far its log-probs are from the trainer's."""
    config = served_config(folder, size, device, quantization=quantization, memory_fraction=0.6)
    trainer = TorchEngine(config)
    trainer.initialise(1)
    print_of = trainer.publish(file := folder / "published.safetensors")
    settings = SglangSettings(512, rows=PROMPTS, group=SAMPLES, patience=600, stall=60, quantization=quantization)
    with server_of(config) as record:
        loader = FileLoader(folder / "weights")
        with closing(SglangEngine(lambda: ServerRecord.load(record), loader, settings)) as engine:
            for version in range(2):
                engine.load(version, print_of, [file])
            seconds(engine, tokens)  # its first batches start threads and kernels
            rate = PROMPTS * SAMPLES * tokens / seconds(engine, tokens)
            asked = requests(size.vocabulary)
            made = engine.generate(asked, lambda: None)
    return {"tokens_per_second": round(rate)} | distance(trainer, asked, made)


@check("sglang", seconds=400, is_alone=True, is_short=False)
def sglang(place: Place) -> Figures:
    """`relax up` with an SGLang server that leaves the device in turns: mismatch of log-probs, memory, seconds."""
    require_kernels(place)
    # More than a server could take beside a trainer that stays.
    devices = ("trainer.device=cuda", "rollout.device=cuda", "rollout.sglang.memory_fraction=0.8")
    # Heads and numbers that its default kernels compute.
    model = ("trainer.precision=bfloat16", "model.architecture.head_dim=64")
    given = (*devices, *SHARED, *model, *SERVED, "run.steps=40", "eval.every=40")
    run = start(place, "sglang", given)
    result = finish(run, place, "sglang", 380)
    turns = [m for m in metrics(place.folder / "sglang") if m.get("kind") == "turn" and m["role"] == "rollout"]
    figures: Figures = {key: value for key, value in result.items() if isinstance(value, int | float)}
    figures["server_left_mib"] = max((turn["device_released_mib"] for turn in turns), default=0)
    if not figures["server_left_mib"]:
        msg = f"the server left the device in none of {len(turns)} turns"
        raise Failed(msg)
    return figures
