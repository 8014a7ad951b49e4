"""Learning-rate schedules and the evaluation schedule, as pure functions of the step."""

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
    """Compute the learning rate of an optimizer step.

    A function of the step alone, so a restarted trainer needs no scheduler state. Warm-up is linear and never 0: step 0
    uses `base / warmup_steps`, step `warmup_steps - 1` uses `base` (with `warmup_steps = 0`, step 0 does). After
    warm-up, "linear" and "cosine" decay to `final_fraction * base`, which is reached at the last step and kept after
    it. "constant" stays at `base`.

    Args:
        step: number of the step, 0 to `total_steps - 1`.
        base: peak learning rate.
        warmup_steps: steps of the warm-up.
        total_steps: steps of the run.
        kind: shape of the decay.
        final_fraction: last learning rate divided by `base`, in [0, 1].

    Raises:
        ValueError: the step is negative, the warm-up is longer than the run, or the fraction is not in [0, 1].
    """
    if step < 0 or not 0 <= warmup_steps <= total_steps or not 0 <= final_fraction <= 1:
        msg = (
            f"step {step}, warmup_steps {warmup_steps}, total_steps {total_steps}, final_fraction {final_fraction}: "
            "need step >= 0, 0 <= warmup_steps <= total_steps and final_fraction in [0, 1]"
        )
        raise ValueError(msg)
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    peak_step = max(warmup_steps - 1, 0)
    progress = min((step - peak_step) / max(total_steps - 1 - peak_step, 1), 1.0)
    match kind:
        case "constant":
            decay = 0.0
        case "linear":
            decay = progress
        case "cosine":
            decay = (1 - math.cos(math.pi * progress)) / 2
        case _:
            assert_never(kind)
    return base * (1 - decay) + final_fraction * base * decay


def scheduled_learning_rate(config: Config, step: int, base: float | None = None) -> float:
    """Compute a step's learning rate from the configuration; see `learning_rate`.

    Without `base`, the peak rate is that of the policy. A warm-up that is longer than the run is cut to the run.
    """
    settings = config.trainer
    return learning_rate(
        step,
        base=settings.learning_rate if base is None else base,
        warmup_steps=min(settings.warmup_steps, config.run.steps),
        total_steps=config.run.steps,
        kind=settings.schedule,
        final_fraction=settings.final_fraction,
    )


def is_evaluated(config: Config, version: int) -> bool:
    """Return whether a version is evaluated: 0, every `eval.every`, and the last."""
    if config.eval is None:
        return False
    every = config.eval.every
    return version in (0, config.run.steps) or (every > 0 and version % every == 0)


def last_evaluated(config: Config, version: int) -> set[int]:
    """Return the two newest evaluated versions up to `version`; may be empty."""
    if config.eval is None:
        return set()
    every = config.eval.every or config.run.steps
    last = config.run.steps if version == config.run.steps else version - version % every
    return {last, last - 1 - (last - 1) % every} if last > 0 else {0}


def reference_version(config: Config, step: int) -> int:
    """Return the reference version of a step; 0 without `algorithm.reference_every`.

    It follows from the step alone, so that a row that is scored again gets the same log-probs, and it is published
    before any row of the step is admitted, so that no row waits for it.
    """
    every = config.algorithm.reference_every
    published = max(0, step - config.staleness.max)
    return 0 if every is None else published - published % every
