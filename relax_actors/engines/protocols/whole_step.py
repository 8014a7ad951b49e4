"""Base class of training engines that compute on a step only when all of its rows have arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.training import StepResult


class WholeStepEngine(Protocol):
    """The method that a subclass of `WholeStep` implements."""

    def step_on(self, samples: Sequence[TrainSample], step: int, progress: Callable[[], None]) -> StepResult:
        """Run forward, backward and optimizer step number `step` on all sequences of the step."""


class WholeStep:
    """Implements `accumulate`, `discard` and `step` of `TrainingEngine` by collecting the sequences of a step."""

    def __init__(self) -> None:
        self._collected: list[TrainSample] = []

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Collect sequences for the step; see `TrainingEngine`."""
        self._collected.extend(samples)
        progress()

    def discard(self) -> None:
        """Discard the collected sequences; see `TrainingEngine`."""
        self._collected.clear()

    def step(self: _Engine, step: int, progress: Callable[[], None]) -> StepResult:
        """Take one optimizer step; see `TrainingEngine`."""
        if not self._collected:
            msg = f"no rows were accumulated for step {step}; call accumulate first"
            raise ValueError(msg)
        try:
            return self.step_on(list(self._collected), step, progress)
        finally:
            self.discard()


class _Engine(WholeStepEngine, Protocol):
    _collected: list[TrainSample]

    def discard(self) -> None: ...
