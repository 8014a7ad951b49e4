"""The rows of the step under way, handed to the engine in parts: it computes on the first before the last are there.

A part is what fits a micro-batch, cut by the rows and their order alone (`split_rows`). The batch cell keeps the order,
so a replay adds the same gradients up in the same order. With run.deterministic the order is that of the slots, else
that in which rows came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from relax_actors.algorithms.micro_batches import split_rows
from relax_actors.engines.protocols import StepResult, TrainingEngine
from relax_actors.runtime import Context
from relax_actors.training.step_rows import Lost, StepReader, StepRows


class Feed:
    """Feeds one engine.

    Args:
        context: the trainer's.
        engine: which nobody else gives rows to.
        reader: of rows.
    """

    def __init__(self, context: Context, engine: TrainingEngine, reader: StepReader) -> None:
        config = context.config
        self._context, self._engine, self._reader = context, engine, reader
        self._budget, self._in_order = config.trainer.max_tokens_per_microbatch, config.run.deterministic
        self._normalisation = config.algorithm.step_normalisation
        # Statistics of the whole step are known only when its last row has come.
        self._early = config.trainer.stream and self._normalisation == "none"
        self._step, self._rows, self._fed = -1, reader.empty(), 0
        self.seconds = self.cpu_seconds = 0.0
        """Time in the engine, for the step under way and in this life."""
        self.early_seconds = 0.0
        """Of a step's time in the engine, what passed before its last row was there."""

    def take(self, step: int, candidates: Mapping[int, int], ready: Callable[[int], bool], rows: int) -> Lost:
        """Read the rows that have come, and compute on those that fill a part.

        Args:
            step: whose rows.
            candidates: index of the row that stands for each slot, as far as there is one.
            ready: whether the row of an index has all that the trainer needs.
            rows: that the step has.

        Returns:
            How rows end that cannot be trained.
        """
        if step != self._step or not set(candidates.values()).issuperset(self._rows.ids):
            self._begin(step)
        new = self._new(candidates, ready)
        if not new or not (self._early or len(self._rows) + len(new) == rows):
            return {}
        found, lost = self._reader.read(step, new)
        if lost and self._in_order:
            found = found.part(range(next(i for i, index in enumerate(new) if index in lost)))
        self._rows.extend(found)
        if len(self._rows) < rows:
            self._compute(self._parts()[:-1])
        return lost

    def _new(self, candidates: Mapping[int, int], ready: Callable[[int], bool]) -> list[int]:
        known, new = set(self._rows.ids), []
        for slot in range(max(candidates, default=-1) + 1):
            index = candidates.get(slot)
            if index is not None and ready(index):
                new += [index] * (index not in known)
            elif self._in_order:
                break
        return new

    def _begin(self, step: int) -> None:
        if self._fed:
            self._engine.discard()
        self._step, self._rows, self._fed = step, self._reader.empty(), 0
        self.seconds = self.early_seconds = 0.0

    def _parts(self) -> list[range]:
        return split_rows(self._rows.lengths, max_tokens=self._budget)

    def complete(self, rows: int) -> StepRows | None:
        """The step's rows, if they are all here."""
        return self._rows if len(self._rows) == rows else None

    def replay(self, step: int, indices: Iterable[int]) -> StepRows:
        """Take the rows of a step that was trained before, in its order.

        Raises:
            ConfigError: one is lost.
        """
        self._begin(step)
        self._rows = self._reader.read_again(step, list(indices))
        return self._rows

    def finish(self, settle: Callable[[], None]) -> StepResult:
        """Compute on what is left, call `settle`, after which nobody reads the weights, and step."""
        self.early_seconds = self.seconds
        self._rows = self._rows.normalised(self._normalisation)
        self._compute(self._parts())
        settle()
        with self._context.device_lock(), self._measured():
            result = self._engine.step(self._step, self._context.progress)
        self._fed, self._rows = 0, self._reader.empty()
        return result

    def _compute(self, parts: list[range]) -> None:
        for part in parts:
            if part.start < self._fed:
                continue
            with self._context.device_lock(), self._measured():
                self._engine.accumulate(self._rows.part(part).samples(), self._context.progress)
            self._fed = part.stop

    @contextmanager
    def _measured(self) -> Iterator[None]:
        at, began = time.monotonic(), time.thread_time()
        yield
        self.seconds += time.monotonic() - at
        self.cpu_seconds += time.thread_time() - began
