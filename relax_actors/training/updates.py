"""Several optimizer updates with one batch: the rows of each update, and the metrics of all of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from relax_actors.engines.protocols import StepResult
from relax_actors.runtime.seeds import derive_seed

SUMS = ("tokens", "micro_batches", "rejected", "opsm_dropped")
"""Metrics that are counts, so that those of several updates add up."""


def minibatches(rows: int, parts: int, epochs: int, seed: int, step: int) -> Iterator[list[int]]:
    """Yield the rows of each update, as ascending positions in the batch.

    Every epoch draws new parts of equal size, from the run's seed, the step and the epoch alone, so a replay makes the
    same updates.

    Args:
        rows: rows of the batch; a multiple of `parts`.
        parts: minibatches of an epoch.
        epochs: passes over the batch.
        seed: seed of the run.
        step: number of the step.
    """
    for epoch in range(epochs):
        generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, "minibatches", step, epoch)))
        order = generator.permutation(rows)
        for part in np.split(order, parts):
            yield sorted(part.tolist())


def combine_updates(results: Sequence[StepResult]) -> StepResult:
    """Combine the metrics of the updates of a batch, and add their number as `updates`.

    Counts are added up, of `max_*` the largest is kept, and all others are means over the updates that report them.
    """
    names = dict.fromkeys(name for result in results for name in result.metrics)
    combined: dict[str, float] = {}
    for name in names:
        values = [float(result.metrics[name]) for result in results if name in result.metrics]
        if name in SUMS:
            combined[name] = sum(values)
        else:
            combined[name] = max(values) if name.startswith("max_") else sum(values) / len(values)
    return StepResult(combined | {"updates": float(len(results))})
