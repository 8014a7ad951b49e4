"""Feed of a step: passes rows to an engine early, and updates the model.

Invariant: rows are cut into parts, one micro-batch each, by the rows and their order alone (`split_rows`). The batch
cell stores the order, so that a replay adds up the same gradients in the same order. With run.deterministic, and for
rows from the data, the order is that of the slots, otherwise the order of arrival. Which rows form a minibatch follows
from the run's seed, the step and the epoch (`training/step_feed.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np

from broker.codec import Array
from relax_actors.algorithms.micro_batches import split_rows
from relax_actors.algorithms.named_functions import needs_whole_step
from relax_actors.config import Config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.engines.protocols import StepResult
from relax_actors.engines.protocols.training import AccumulatesSteps, Score, SupportsScore
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import POLICY_LOSSES
from relax_actors.runtime import Context
from relax_actors.runtime.seeds import derive_seed
from relax_actors.training.auxiliary_terms import with_auxiliary_terms
from relax_actors.training.step_advantages import StepAdvantages
from relax_actors.training.step_rows import StepReader, StepRows, UnusableRows


def proximal_score(config: Config, engine: object) -> Score | None:
    """Return how to compute proximal log-probs, if needed; raises ConfigError."""
    trainer = config.trainer
    if trainer.updates == 1 or config.algorithm.proximal != "trainer":
        return None
    if not isinstance(engine, SupportsScore):
        msg = (
            f"trainer.backend = {trainer.backend!r} cannot compute the log-probs before the first of {trainer.updates} "
            'updates of a batch, which algorithm.proximal = "trainer" needs; set algorithm.proximal = "rollout" or '
            '"actor_fwd", or trainer.minibatches = 1 and trainer.epochs = 1'
        )
        raise ConfigError(msg)
    return engine.score


class StepFeed:
    """Collects the rows of one step at a time and feeds them to an engine in parts.

    Nothing else may pass rows to the engine. `score` computes the log-probs of the proximal policy before the first of
    several updates, with the weights of the engine; None if no loss reads them. `section` has the learning rate, for
    errors.
    """

    def __init__(
        self,
        context: Context,
        engine: AccumulatesSteps,
        reader: StepReader,
        score: Score | None = None,
        *,
        section: Section = "trainer",
    ) -> None:
        config = context.config
        self._context, self._engine, self._reader, self._score = context, engine, reader, score
        self._section: Section = section
        self._max_tokens, self._in_slot_order = (
            config.trainer.max_tokens_per_microbatch,
            config.run.deterministic or not config.generates,
        )
        # Statistics over a whole step, and its minibatches, are known only when its last row has arrived.
        whole = needs_whole_step(config.algorithm) or config.trainer.updates > 1
        # Each part of a step would be a turn of its own.
        self._streams = config.trainer.stream and not whole and not config.placement.leaves_device(section)
        # Steps in which the policy waits for its critic.
        self._skipped = 0 if config.critic is None else config.critic.warmup_steps
        self.statistics = StepAdvantages(config.algorithm)
        """The part of the advantages that needs the whole step, and its state."""
        self._step, self._rows, self._fed = -1, reader.empty(), 0
        self.seconds = self.cpu_seconds = 0.0
        """Wall time in the engine for the current step, and CPU time in the engine for this incarnation."""
        self.early_seconds = 0.0
        """Wall time in the engine before the last row of the step was there."""
        self.has_read_usable = False
        """Whether any row that this incarnation read could be trained."""

    def take(self, step: int, candidates: Mapping[int, int], ready: Callable[[int], bool], rows: int) -> UnusableRows:
        """Read the rows that have become ready, and compute on the parts that are full.

        If a row that was already read is no longer a candidate, the gradients are discarded and accumulated again.

        Args:
            step: number of the step.
            candidates: index of the row that fills each slot; slots without a row are missing.
            ready: whether the row with an index has every required column.
            rows: number of rows in the step.

        Returns:
            The rows that cannot be trained.
        """
        if step != self._step or not set(candidates.values()).issuperset(self._rows.ids):
            self._reset(step)
        new = self._new_rows(candidates, ready)
        if not new or not (self._streams or len(self._rows) + len(new) == rows):
            return {}
        read, unusable = self._reader.read(step, new)
        self.has_read_usable |= len(read) > 0
        if unusable and self._in_slot_order:
            # Rows after an unusable one must wait for its successor, which takes its place in the order.
            read = read.part(range(next(i for i, index in enumerate(new) if index in unusable)))
        self._rows.extend(read)
        if self._streams and step >= self._skipped and len(self._rows) < rows:
            # Later rows may still join the last part.
            self._compute(self._parts()[:-1])
        return unusable

    def _new_rows(self, candidates: Mapping[int, int], ready: Callable[[int], bool]) -> list[int]:
        """Return the ready rows that have not been read; in slot order, only up to the first gap."""
        known, new = set(self._rows.ids), []
        for slot in range(max(candidates, default=-1) + 1):
            index = candidates.get(slot)
            if index is not None and ready(index):
                new += [index] * (index not in known)
            elif self._in_slot_order:
                break
        return new

    def _reset(self, step: int) -> None:
        if self._fed:
            self._engine.discard()
        self._step, self._rows, self._fed = step, self._reader.empty(), 0
        self.seconds = self.early_seconds = 0.0

    def _parts(self) -> list[range]:
        return split_rows(self._rows.lengths, max_tokens=self._max_tokens)

    @property
    def has_begun(self) -> bool:
        """Whether the engine has computed on rows of a step that is not complete."""
        return self._fed > 0

    def complete(self, rows: int) -> StepRows | None:
        """Return the step's rows if all `rows` of them have been read."""
        return self._rows if len(self._rows) == rows else None

    def replay(self, step: int, indices: Iterable[int]) -> StepRows:
        """Read a trained step's rows in its batch's order; raises ConfigError if one is lost."""
        self._reset(step)
        self._rows = self._reader.read_again(step, list(indices))
        return self._rows

    def finish_policy(self, before_step: Callable[[], None]) -> StepResult:
        """Do as `finish`; in the warm-up steps of a critic leave the weights as they are."""
        if self._step >= self._skipped:
            return self.finish(before_step)
        self._fed, self._rows = 0, self._reader.empty()
        return StepResult({"updates": 0.0})

    def finish(self, before_step: Callable[[], None]) -> StepResult:
        """Compute on the remaining rows, call `before_step`, and do the optimizer's updates.

        `before_step` returns when the current weights are no longer being read, e.g. by the publisher.
        """
        self.early_seconds = self.seconds
        self._rows = self.statistics.apply(self._rows)
        trainer, run = self._context.config.trainer, self._context.config.run
        if trainer.updates == 1:
            self._rows = self._with_terms(self._rows)
            self._compute(self._parts())
            before_step()
            result = self._update()
        else:
            whole = self._with_proximal(self._rows)
            before_step()
            results = []
            for rows in minibatches(len(whole), trainer.minibatches, trainer.epochs, run.seed, self._step):
                self._rows, self._fed = self._with_terms(whole.part(rows)), 0
                self._compute(self._parts())
                results.append(self._update())
            result = combine_updates(results)
        self._fed, self._rows = 0, self._reader.empty()
        return result

    def _with_terms(self, rows: StepRows) -> StepRows:
        return with_auxiliary_terms(rows, self._context.config.algorithm) if self._section == "trainer" else rows

    def _update(self) -> StepResult:
        with self._context.device_lock(), self._measured():
            return self._engine.step(self._step, self._context.progress)

    def _with_proximal(self, rows: StepRows) -> StepRows:
        """Add the trainer's log-probs before the first update, if the ratio needs them."""
        if self._score is None:
            return rows
        scored: list[Array] = []
        for part in self._parts():
            with self._context.device_lock(), self._measured():
                scored += self._score(rows.part(part).samples(), self._context.progress)
        return rows.with_proximal(iter(scored))

    def _compute(self, parts: list[range]) -> None:
        """Accumulate gradients of the parts that have not been fed yet."""
        for part in parts:
            if part.start < self._fed:
                continue
            with self._context.device_lock(), self._measured():
                self._engine.accumulate(self._rows.part(part).samples(), self._context.progress)
            self._fed = part.stop

    @contextmanager
    def _measured(self) -> Iterator[None]:
        wall_start, cpu_start = time.monotonic(), time.thread_time()
        try:
            yield
        except ConfigError as error:
            msg = f"step {self._step}: {error}"
            raise ConfigError(msg) from error
        except FloatingPointError as error:
            # A replay of the step would compute the same number.
            why = diverged(error, self._context.config.algorithm, self._section)
            msg = f"step {self._step}: {why}"
            raise ConfigError(msg) from error
        self.seconds += time.monotonic() - wall_start
        self.cpu_seconds += time.thread_time() - cpu_start


SUMS = ("tokens", "micro_batches", "rejected", "opsm_dropped", "skipped_updates")
"""Metrics that are counts, so that those of several updates add up."""
LAST = ("loss_scale",)
"""Metrics of the state after an update, so that the last update's counts."""


def minibatches(rows: int, parts: int, epochs: int, seed: int, step: int) -> Iterator[list[int]]:
    """Yield the rows of each update, as ascending positions in the batch.

    Every epoch draws new parts of equal size, as far as a short last step allows, from the run's seed, the step and the
    epoch alone, so a replay makes the same updates.
    """
    for epoch in range(epochs):
        generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, "minibatches", step, epoch)))
        order = generator.permutation(rows)
        for part in np.array_split(order, min(parts, rows)):
            yield sorted(part.tolist())


def combine_updates(results: Sequence[StepResult]) -> StepResult:
    """Combine the metrics of the updates of a batch, and add their number as `updates`.

    Counts are added up, of `max_*` the largest is kept, of `loss_scale` the last, and all others are means over the
    updates that report them.
    """
    names = dict.fromkeys(name for result in results for name in result.metrics)
    combined: dict[str, float] = {}
    for name in names:
        values = [float(result.metrics[name]) for result in results if name in result.metrics]
        if name in SUMS:
            combined[name] = sum(values)
        elif name in LAST:
            combined[name] = values[-1]
        else:
            combined[name] = max(values) if name.startswith("max_") else sum(values) / len(values)
    micro_batches = [one for result in results for one in result.micro_batches]
    return StepResult(combined | {"updates": float(len(results))}, micro_batches)


Section = Literal["trainer", "critic", "trainer.warm_start"]


def diverged(error: FloatingPointError, algorithm: AlgorithmSection, section: Section) -> str:
    """Describe a gradient that is not finite, with the remedy.

    A function of the user is the likeliest cause: its loss was checked and is finite, while its gradient is not.
    `section` has the learning rate of the diverged model.
    """
    if section == "trainer" and algorithm.surrogate not in POLICY_LOSSES.built_in:
        return (
            f"{error}, although the loss of algorithm.surrogate = {algorithm.surrogate!r} is finite; bound square "
            "roots, powers and divisions whose gradient is not, e.g. (x * x + 1e-12).sqrt(), and repeat `relax up`; if "
            "the gradient of the function is always finite, start a new run with a lower trainer.learning_rate"
        )
    bounds = "" if section == "trainer.warm_start" else " or tighter clip bounds"
    return f"{error}: the loss diverged; start a new run with a lower {section}.learning_rate{bounds}"
