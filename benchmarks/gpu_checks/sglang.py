"""Checks of SGLang's server with its own kernels."""

from __future__ import annotations

from importlib.util import find_spec

from turns import metrics

from gpu_checks.frame import Failed, Figures, Place, Skipped, check, require
from gpu_checks.runs import SHARED, finish, start


@check("sglang", seconds=400, is_alone=True, is_short=False)
def sglang(place: Place) -> Figures:
    """`relax up` with an SGLang server that leaves the device in turns: mismatch of log-probs, memory, seconds."""
    place.require_gpu()
    require("sglang", "sgl_kernel")
    if find_spec("relax_sglang_cpu") is not None:
        msg = "its kernels for CPUs are installed, not those for GPUs"
        raise Skipped(msg)
    # More than a server could take beside a trainer that stays.
    devices = ("trainer.device=cuda", "rollout.device=cuda", "rollout.sglang.memory_fraction=0.8")
    # Heads and numbers that its default kernels compute.
    model = ("trainer.precision=bfloat16", "model.architecture.head_dim=64")
    given = (*devices, *SHARED, *model, "rollout.backend=sglang", "run.steps=40", "eval.every=40")
    run = start(place, "sglang", given)
    result = finish(run, place, "sglang", 380)
    turns = [m for m in metrics(place.folder / "sglang") if m.get("kind") == "turn" and m["role"] == "rollout"]
    figures: Figures = {key: value for key, value in result.items() if isinstance(value, int | float)}
    figures["server_left_mib"] = max((turn["device_released_mib"] for turn in turns), default=0)
    if not figures["server_left_mib"]:
        msg = f"the server left the device in none of {len(turns)} turns"
        raise Failed(msg)
    return figures
