"""Figures of a step: the trainer's metric `step`, which a replay computes again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relax_actors.config import Config
from relax_actors.engines.protocols.training import GRADIENT_OF
from relax_actors.messages import Batch
from relax_actors.training.step_figures import step_figures
from relax_actors.training.step_rows import StepRows

BY_MICRO_BATCH = "by_micro_batch"
"""Field of the metric with figures of micro-batches."""
OF_MICRO_BATCH, SUMS = ("tokens", "loss", "ratio", "abs_delta", "gradient"), ("tokens", "gradient")
"""Figures of a micro-batch, means over its tokens but for `SUMS`."""
MAX_MICRO_BATCHES = 64
"""Micro-batches with figures: the log keeps the metrics of all steps, and this one has at most 4 KiB more."""
TIMES = "_seconds"
"""End of the names of figures that are times: those of a replay are its own."""


def figures_of_step(
    config: Config, step: int, batch: Batch, rows: StepRows, measured: Mapping[str, float]
) -> dict[str, float]:
    """Return the figures of a step, rounded as they are published; rows of data have no reward.

    `measured` has the metrics of the engine, and times.
    """
    staleness = rows.staleness(step)
    return {
        "step": step,
        **({} if config.from_data else {"reward": round(batch.reward, 5)}),
        **{f"reward/{name}": round(mean, 5) for name, mean in rows.reward_components.items()},
        "staleness": batch.staleness,
        "staleness_mean": round(float(np.mean(staleness)), 4),
        "span": rows.span,
        **({} if (gap := rows.teacher_gap) is None else {"teacher_kl": round(gap, 6)}),
        "stale_rows": sum(own > config.staleness.max for own in staleness),
        "waited_seconds": 0.0,
        "train_seconds": 0.0,
        **{name: round(float(value), 6) for name, value in measured.items()},
        **step_figures(rows.trajectories, rows.advantages),
        **({} if rows.reward_kl is None else {"reward_kl": round(rows.reward_kl, 6)}),
    }


def micro_batch_figures(parts: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return figures of the first `MAX_MICRO_BATCHES` micro-batches: a list by name.

    `parts` are sums over the tokens of a micro-batch; see `StepResult`.
    """
    shown = parts[:MAX_MICRO_BATCHES]
    names = [name for name in OF_MICRO_BATCH if shown and all(name in part for part in shown)]
    return {
        name: [round(part[name] / (1.0 if name in SUMS else max(1.0, part.get("tokens", 1.0))), 9) for part in shown]
        for name in names
    }


def gradients_of_micro_batches(parts: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return the norm of each tensor's gradients, by name, of the micro-batches that `micro_batch_figures` shows."""
    return [
        {name.removeprefix(GRADIENT_OF): norm for name, norm in part.items() if name.startswith(GRADIENT_OF)}
        for part in parts[:MAX_MICRO_BATCHES]
    ]


def is_time(name: str) -> bool:
    """Whether a figure is a time, which differs from one computation of a step to another."""
    return name.endswith(TIMES)
