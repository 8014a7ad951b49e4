"""Comparisons with TRL on the same job."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from grpo_vs_trl import Result, run_relax, run_trl
from grpo_workload import ARCHITECTURE, Workload
from ppo_vs_trl import algorithm

from gpu_checks.frame import Failed, Figures, Place, check, require
from gpu_checks.workload import QWEN3_0_6B

WARM_UP = 2


@check("grpo_vs_trl", seconds=500, is_alone=True, is_short=False)
def grpo_vs_trl(place: Place) -> Figures:
    """GRPO against TRL at equal settings: completions a second, memory; on a GPU a model of Qwen3-0.6B's shape."""
    require("trl")
    work = workload(place)
    return compared(work, run_relax(work, 0, staleness=0), run_trl(work, 0, Path(sys.executable)))


@check("ppo_vs_trl", seconds=500, is_alone=True, is_short=False)
def ppo_vs_trl(place: Place) -> Figures:
    """PPO with a critic against TRL at equal settings, as `grpo_vs_trl`; needs TRL 1.12, the last one that has PPO."""
    require("trl", "trl.experimental.ppo")
    work = workload(place, epochs=4)
    ours = run_relax(work, 0, 0, algorithm(work))
    return compared(work, ours, run_trl(work, 0, Path(sys.executable), "ppo_trl_side.py"))


def workload(place: Place, epochs: int = 1) -> Workload:
    """Make the model and the prompts of a comparison."""
    sizes = {"steps": 10, "new_tokens": 128} if place.on_gpu else {"steps": 6}
    work = Workload(
        str(place.folder),
        **sizes,
        epochs=epochs,
        device=place.device,
        precision="bfloat16" if place.on_gpu else "float32",
        learning_rate=1e-5,
        architecture=QWEN3_0_6B if place.on_gpu else ARCHITECTURE,
    )
    work.make()
    return work


def compared(work: Workload, ours: Result, theirs: Result) -> Figures:
    """Return the figures of both sides; raises Failed if ours lacks a step."""
    figures: Figures = {}
    for name, side in (("relax", ours), ("trl", theirs)):
        figures |= {
            f"{name}_completions_per_second": side.completions_per_second(work, WARM_UP),
            f"{name}_step_seconds": seconds(side),
            f"{name}_reward": side.last_reward,
            f"{name}_host_mib": round(side.memory.peak_mib),
        }
    figures["ratio"] = ours.completions_per_second(work, WARM_UP) / theirs.completions_per_second(work, WARM_UP)
    figures |= {key: round(value, 3) for key, value in ours.extra.items()}
    if len(ours.times) != work.steps:
        msg = f"{len(ours.times)} of {work.steps} steps"
        raise Failed(msg)
    return figures


def seconds(side: Result) -> float:
    """Return the median seconds of a step."""
    return statistics.median(b - a for a, b in zip(side.times[WARM_UP:], side.times[WARM_UP + 1 :], strict=False))
