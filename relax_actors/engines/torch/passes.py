"""Forward and backward passes of an optimizer update, on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.sequence_records import StepFacts
from relax_actors.engines.protocols.samples import MicroBatchPlan, TrainSample
from relax_actors.engines.torch import replay_metrics
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.forward import Forward
from relax_actors.engines.torch.loss_inputs import ScoredTokens
from relax_actors.engines.torch.micro_batch import MicroBatch
from relax_actors.engines.torch.objective import StepObjective
from relax_actors.engines.torch.optimized_model import LossOf, OptimizedModel
from relax_actors.engines.torch.sharding import Whole
from relax_actors.engines.torch.step_facts import (
    Records,
    loss_inputs,
    needs_records,
    pack_records,
    record,
    step_facts,
    unpack_records,
)


class Passes:
    """Accumulates the gradients of one update after another.

    A micro-batch has at most `max_tokens`. `routers` replay recorded experts, and every `comparison_interval` steps, if
    not 0, a pass without them is compared.
    """

    def __init__(
        self,
        forward: Forward,
        trained: OptimizedModel,
        sharding: Whole,
        routers: Routers | None,
        max_tokens: int,
        comparison_interval: int,
    ) -> None:
        self._forward, self._trained, self._sharding, self._routers = forward, trained, sharding, routers
        self._model, self._max_tokens = trained.model, max_tokens
        self._comparison_interval = comparison_interval
        self._steps_to_comparison = 0

    def end_step(self) -> None:
        """Count a step that the model has taken."""
        self._steps_to_comparison = max(0, self._steps_to_comparison - 1)

    def backward(self, samples: Sequence[TrainSample], loss_of: LossOf, progress: Callable[[], None]) -> None:
        """Run forward and backward for sequences, micro-batch by micro-batch."""
        plans = self._forward.plan(samples, self._max_tokens)
        self._trained.backward(plans, self._forward.loss(self._model, loss_of), progress)

    def train(
        self, objective: StepObjective, parts: Sequence[Sequence[TrainSample]], progress: Callable[[], None], seed: int
    ) -> None:
        """Run forward and backward for the parts of a step, after a forward pass if the loss needs one."""
        samples = [sample for part in parts for sample in part]
        facts = None
        keeps_rows = objective.needs_row_sums and all(self._forward.keeps_rows(p, self._max_tokens) for p in parts)
        if needs_records(objective, samples, keeps_rows=keeps_rows):
            facts = step_facts(objective, samples, self._record(objective, parts, progress), seed)
        start = 0
        for part in parts:
            compared = self._measure_without_replay(part)
            self.backward(part, partial(self._loss_of, objective, part, facts, start), progress)
            if compared:
                self._trained.measured[0] |= compared
            start += len(part)

    @torch.no_grad()
    def _record(
        self, objective: StepObjective, parts: Sequence[Sequence[TrainSample]], progress: Callable[[], None]
    ) -> Records:
        """Run the forward pass before the backward passes, in the same micro-batches."""
        records, nothing, start = Records(), Records(), 0

        def record_batch(part: Sequence[TrainSample], plan: MicroBatchPlan) -> Records:
            batch, chosen = self._forward.micro_batch(part, plan), [part[index] for index in plan.indices]
            scored = self._scored(objective, batch, entropies=objective.top_entropy is not None)
            inputs = loss_inputs(objective, chosen, scored, batch.mask, partial(self._padded, batch))
            return record(objective, inputs, [start + index for index in plan.indices])

        number = len(self._trained.measured)
        for part in parts:
            for plan in self._forward.plan(part, self._max_tokens):
                with self._trained.dropping(number):
                    records |= self._forward.without_loss(self._model, plan, partial(record_batch, part), nothing)
                number += 1
                progress()
            start += len(part)
        if self._routers is not None:
            self._routers.reroutes.take()
        if self._sharding.is_whole:
            return records
        everyone = self._sharding.all_gather(pack_records(records))
        return unpack_records([message for part in everyone for message in part])

    def _loss_of(
        self,
        objective: StepObjective,
        samples: Sequence[TrainSample],
        facts: StepFacts | None,
        start: int,
        plan: MicroBatchPlan,
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss of a micro-batch; `start` is the position of the first of `samples` in the step's facts."""
        batch, chosen = self._forward.micro_batch(samples, plan), [samples[index] for index in plan.indices]
        ids = None
        if objective.needs_teacher and chosen[0].teacher_top_ids is not None:
            ids = self._padded(batch, [sample.masked("teacher_top_ids") for sample in chosen])
        scored = self._scored(objective, batch, entropies=objective.trains_entropy, ids=ids)
        replay_measured = {} if self._routers is None else self._routers.reroutes.take()
        padded, places = partial(self._padded, batch), [start + index for index in plan.indices]
        inputs = loss_inputs(objective, chosen, scored, batch.mask, padded, facts=facts, indices=places)
        loss, measured = objective.loss(inputs)
        return loss, measured | replay_measured

    def _scored(
        self, objective: StepObjective, batch: MicroBatch, *, entropies: bool, ids: Tensor | None = None
    ) -> ScoredTokens:
        """Compute log-probs of the trained tokens, and their entropies and log-probs of other tokens if asked for."""
        wanted = {"entropies": entropies, "squares": objective.reads_squares}
        return self._forward.score_trained(self._model, batch, ids=ids, routers=self._routers, **wanted)

    def _padded(self, batch: MicroBatch, arrays: Sequence[NDArray[Any]]) -> Tensor:
        return self._forward.padded(arrays, batch.width)

    @torch.no_grad()
    def _measure_without_replay(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Measure a pass without replay, for the first micro-batch of a step, once per comparison interval."""
        if self._routers is None or all(sample.routed_experts is None for sample in samples):
            return {}
        if self._trained.measured or not self._comparison_interval or self._steps_to_comparison:
            return {}
        self._steps_to_comparison = self._comparison_interval
        routers = self._routers

        def compare(plan: MicroBatchPlan) -> dict[str, float]:
            batch = self._forward.micro_batch(samples, plan)
            rollout = self._padded(batch, [samples[index].masked("logprobs") for index in plan.indices])
            logprobs = self._forward.logprobs(self._model, batch, routers=routers, only_count=True)
            counts = replay_metrics.unreplayed_counts(routers.reroutes.take())
            return replay_metrics.unreplayed_mismatch(logprobs, rollout, batch.mask) | counts

        first = self._forward.plan(samples, self._max_tokens)[0]
        return self._forward.without_loss(self._model, first, compare, {})
