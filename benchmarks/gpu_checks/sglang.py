"""Checks of SGLang's server with its own kernels."""

from __future__ import annotations

from importlib.util import find_spec

from engines import Size
from server_weights import compare
from turns import metrics

from gpu_checks.frame import Failed, Figures, Place, Skipped, check, require
from gpu_checks.runs import SHARED, finish, start

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
