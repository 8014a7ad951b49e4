"""Checks of SGLang's server with its own kernels."""

from __future__ import annotations

from gpu_checks.frame import Figures, Place, check, require
from gpu_checks.runs import SHARED, finish, start


@check("sglang", seconds=400, is_alone=True, is_short=False)
def sglang(place: Place) -> Figures:
    """`relax up` with an SGLang server on the device: mismatch of log-probs, seconds."""
    place.require_gpu()
    require("sglang", "sgl_kernel")
    devices = ("trainer.device=cuda", "rollout.device=cuda", "rollout.sglang.memory_fraction=0.3")
    run = start(place, "sglang", (*devices, *SHARED, "rollout.backend=sglang", "run.steps=40", "eval.every=40"))
    result = finish(run, place, "sglang", 380)
    return {key: value for key, value in result.items() if isinstance(value, int | float)}
