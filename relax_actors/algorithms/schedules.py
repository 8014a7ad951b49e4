"""Learning-rate schedules as a function of the step, so that a restarted trainer needs no state for them."""

from __future__ import annotations

import math
from typing import Literal, assert_never

from relax_actors.config import Config

ScheduleKind = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int,
    *,
    base: float,
    warmup_steps: int,
    total_steps: int,
    kind: ScheduleKind,
    final_fraction: float,
) -> float:
    """Learning rate of optimizer step `step`, which counts from 0 to `total_steps - 1`.

    Warm-up is linear and never 0: the first step uses `base / warmup_steps`, step `warmup_steps - 1` the whole `base`
    (with `warmup_steps = 0` step 0 does). From there "linear" and "cosine" fall to `final_fraction * base`, reached
    at the last step and kept after it; "constant" stays at `base`.
    Raises ValueError when the step is negative, the warm-up outlasts the run, or the fraction is not in [0, 1].
    """
    if step < 0 or not 0 <= warmup_steps <= total_steps or not 0 <= final_fraction <= 1:
        msg = (
            f"step {step}, warmup_steps {warmup_steps}, total_steps {total_steps}, final_fraction {final_fraction}: "
            "need step >= 0, 0 <= warmup_steps <= total_steps and final_fraction in [0, 1]"
        )
        raise ValueError(msg)
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    peak = max(warmup_steps - 1, 0)
    progress = min((step - peak) / max(total_steps - 1 - peak, 1), 1.0)
    match kind:
        case "constant":
            fallen = 0.0
        case "linear":
            fallen = progress
        case "cosine":
            fallen = (1 - math.cos(math.pi * progress)) / 2
        case _:
            assert_never(kind)
    return base * (1 - fallen) + final_fraction * base * fallen


def rate_of(config: Config, step: int) -> float:
    """Learning rate of a run's optimizer step `step`; see `learning_rate`."""
    settings = config.trainer
    return learning_rate(
        step,
        base=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        total_steps=config.run.steps,
        kind=settings.schedule,
        final_fraction=settings.final_fraction,
    )


def is_evaluated(config: Config, version: int) -> bool:
    """Whether a version is one to evaluate: the first, every so many, and the last."""
    if config.eval is None:
        return False
    every = config.eval.every
    return version in (0, config.run.steps) or (every > 0 and version % every == 0)


def last_evaluated(config: Config, version: int) -> set[int]:
    """The last two versions to evaluate, up to `version`."""
    if config.eval is None:
        return set()
    every = config.eval.every or config.run.steps
    last = config.run.steps if version == config.run.steps else version - version % every
    return {last, last - 1 - (last - 1) % every} if last > 0 else {0}
