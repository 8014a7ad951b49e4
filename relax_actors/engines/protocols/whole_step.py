"""Base of engines that compute on the rows of a step when all of them are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.training import StepResult


class StepsOnBatches(Protocol):
    """What such an engine implements."""

    def step_on(self, samples: Sequence[TrainSample], step: int, progress: Callable[[], None]) -> StepResult:
        """Run forward, backward and optimizer step number `step` on all sequences of the step."""


class WholeStep:
    """The part of `TrainingEngine` that collects the sequences of a step."""

    def __init__(self) -> None:
        self._collected: list[TrainSample] = []

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Keep sequences for the step; see the protocol."""
        self._collected.extend(samples)
        progress()

    def discard(self) -> None:
        """Drop the collected sequences; see the protocol."""
        self._collected.clear()

    def step(self: _Engine, step: int, progress: Callable[[], None]) -> StepResult:
        """One optimizer step; see the protocol."""
        if not self._collected:
            msg = f"no rows were accumulated for step {step}"
            raise ValueError(msg)
        try:
            return self.step_on(list(self._collected), step, progress)
        finally:
            self.discard()


class _Engine(StepsOnBatches, Protocol):
    _collected: list[TrainSample]

    def discard(self) -> None: ...
