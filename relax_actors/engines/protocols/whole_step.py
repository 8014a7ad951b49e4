"""For engines that compute on a step's rows when all of them are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from relax_actors.engines.protocols.sequences import Sequences
from relax_actors.engines.protocols.training import StepResult, TrainBatch


class StepsOnBatches(Protocol):
    """What such an engine does with a step's rows."""

    def step_on(self, batch: TrainBatch, step: int, progress: Callable[[], None]) -> StepResult:
        """Forward, backward and optimizer step number `step` on all of its rows."""


class Whole:
    """The part of `TrainingEngine` that gathers rows."""

    def __init__(self) -> None:
        self._gathered_rows: list[TrainBatch] = []

    def accumulate(self, batch: TrainBatch, progress: Callable[[], None]) -> None:
        """Keep rows for the step; see the protocol."""
        self._gathered_rows.append(batch)
        progress()

    def discard(self) -> None:
        """Forget rows; see the protocol."""
        self._gathered_rows.clear()

    def step(self: _Engine, step: int, progress: Callable[[], None]) -> StepResult:
        """One optimizer step; see the protocol."""
        try:
            return self.step_on(joined(self._gathered_rows), step, progress)
        finally:
            self.discard()


class _Engine(StepsOnBatches, Protocol):
    _gathered_rows: list[TrainBatch]

    def discard(self) -> None: ...


def joined(parts: Sequence[TrainBatch]) -> TrainBatch:
    """Batches one after the other.

    Raises:
        ValueError: there is none.
    """
    if not parts:
        msg = "no rows were accumulated for the step"
        raise ValueError(msg)
    proximal = [part.proximal_logprobs for part in parts]
    reference = [part.reference_logprobs for part in parts]
    return TrainBatch(
        Sequences(
            [p for part in parts for p in part.sequences.prompts],
            [c for part in parts for c in part.sequences.completions],
            _chained([part.sequences.experts for part in parts]),
        ),
        [logprobs for part in parts for logprobs in part.old_logprobs],
        np.concatenate([part.advantages for part in parts]),
        proximal_logprobs=_chained(proximal),
        reference_logprobs=_chained(reference),
        samples=[n for part in parts for n in part.samples],
    )


def _chained(columns: Sequence[Sequence[NDArray[Any]] | None]) -> list[NDArray[Any]] | None:
    there = [column for column in columns if column is not None]
    return [array for column in there for array in column] if there else None
