"""Gradients of one optimizer update on this rank: its loss, its parts, and their measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.controllers import Coefficients
from relax_actors.algorithms.losses import add_metrics, sft_loss
from relax_actors.algorithms.sequence_records import StepFacts
from relax_actors.config.schema import Config
from relax_actors.engines.megatron.mcore import process_groups
from relax_actors.engines.megatron.mcore.micro_batches import MicroBatch, MicroBatchTensors
from relax_actors.engines.megatron.mcore.process_groups import reports_metrics
from relax_actors.engines.megatron.mcore.reference import Reference
from relax_actors.engines.megatron.mcore.replay import Replay
from relax_actors.engines.megatron.mcore.schedule import LossFunction, Schedule, Score
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.ranks.collectives import all_gather_messages
from relax_actors.engines.torch import replay_metrics
from relax_actors.engines.torch.loss_inputs import ScoredTokens
from relax_actors.engines.torch.objective import StepObjective
from relax_actors.engines.torch.step_facts import (
    Records,
    loss_inputs,
    needs_records,
    pack_records,
    record,
    step_facts,
    unpack_records,
)

Dropping: TypeAlias = Callable[[int], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Part:
    """Part of an update: its sequences, this rank's micro-batches, and their reference log-probs by number."""

    samples: Sequence[TrainSample]
    batches: list[MicroBatch]
    reference: dict[int, Tensor]


class Update:
    """Accumulates the gradients of one update after another.

    Methods are collective: all ranks must call them in the same order with the same arguments. `dropping` returns the
    context of passes that train, in which inputs of an adapter are dropped, from the number of the first micro-batch in
    the update.

    Attributes:
        measured: measurements of each micro-batch of the last update, of all ranks.
        reference: reference of the KL penalty, if this engine computes it.
        norms: returns the norms of the accumulated gradients, which `measured` then has; collective.
    """

    def __init__(
        self, config: Config, models: Sequence[Any], schedule: Schedule, replay: Replay | None, dropping: Dropping
    ) -> None:
        self._algorithm, self._virtual = config.algorithm, config.trainer.megatron.virtual_pipeline
        self._pipeline = config.trainer.megatron.pipeline_parallel
        self._models, self._schedule, self._replay, self._dropping = models, schedule, replay, dropping
        self._device = process_groups.device()
        self._steps_to_comparison = 0
        self.measured: list[dict[str, float]] = []
        self.reference: Reference | None = None
        self.norms: Callable[[], dict[str, float]] | None = None
        self.discard()

    def discard(self) -> None:
        """Forget the current update; the caller clears the gradients."""
        self.objective: StepObjective | None = None
        self.micro_batches = self._trained = 0
        self._kept: list[Part] = []
        self._shared: list[dict[str, float]] = []
        self._local: list[dict[str, float]] = []
        self._norms: list[dict[str, float]] = []

    def begin(self, coefficients: Coefficients) -> None:
        """Begin an update."""
        self.objective = StepObjective(self._algorithm, coefficients)

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Accumulate the gradients of sequences, or keep them until `finish` if the loss needs the whole step."""
        assert self.objective is not None  # noqa: S101 set by `begin`
        part = self._part(samples, progress)
        if self.objective.needs_whole_step:
            self._kept.append(part)
        else:
            self._train_parts(self.objective, [part], progress, seed=0)

    def accumulate_supervised(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Accumulate the gradients of the cross-entropy of sequences."""
        tokens = sum(sample.trained for sample in samples)

        def loss_function(_: int, tensors: MicroBatchTensors, scored: ScoredTokens) -> tuple[Tensor, dict[str, float]]:
            loss = sft_loss(scored.logprobs, tensors.mask, tokens)
            return loss, {"loss": float(loss.detach())}

        batches = self._schedule.micro_batches(samples)
        self._shared += self._train(batches, samples, loss_function, progress, self._schedule.scores(temperature=1.0))
        self.micro_batches += len(batches)

    def finish(self, progress: Callable[[], None], seed: int) -> dict[str, float]:
        """Train the parts that were kept, and return the measurements of all ranks."""
        objective = self.objective
        if objective is not None and self._kept:
            self._train_parts(objective, self._kept, progress, seed)
        measured, log_ratios = self._gather_metrics([] if objective is None else objective.log_ratios)
        if objective is not None:
            objective.log_ratios = log_ratios
        self._steps_to_comparison = max(0, self._steps_to_comparison - 1)
        return measured

    def _part(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> Part:
        """Plan the micro-batches of a part of the step, and score them with the reference."""
        batches = self._schedule.micro_batches(samples)
        reference: dict[int, Tensor] = {}
        if self.reference is not None and samples[0].reference_logprobs is None:
            if self._replay is not None:  # the reference of an adapter is the model in training, with its routers
                self._replay.begin(replays=False, trains=False)
            with self.reference.models() as models:
                reference = self._schedule.score(models, batches, samples, progress)
        self._local += self._measure_without_replay(samples, batches, progress)
        self.micro_batches += len(batches)
        return Part(samples, batches, reference)

    def _train_parts(
        self, objective: StepObjective, parts: Sequence[Part], progress: Callable[[], None], seed: int
    ) -> None:
        """Run forward and backward for the parts of a step, after a forward pass if the loss needs one."""
        samples = [sample for part in parts for sample in part.samples]
        facts = None
        keeps_rows = objective.needs_row_sums and all(self._schedule.keeps_rows(part.samples) for part in parts)
        if needs_records(objective, samples, keeps_rows=keeps_rows):
            facts = step_facts(objective, samples, self._record(objective, parts, progress), seed)
        wanted = {"entropies": objective.trains_entropy, "squares": objective.reads_squares}
        score = self._schedule.scores(top=objective.needs_teacher, **wanted)
        start = 0
        for part in parts:
            loss_function = partial(self._loss_of, objective, part, facts, start)
            self._shared += self._train(part.batches, part.samples, loss_function, progress, score)
            if self._replay is not None:
                self._local.append(self._replay.reroutes.take())
            start += len(part.samples)

    @torch.no_grad()
    def _record(self, objective: StepObjective, parts: Sequence[Part], progress: Callable[[], None]) -> Records:
        """Run the forward pass before the backward passes; records of all ranks."""
        records: Records = {}
        start = 0
        wanted = {"entropies": objective.top_entropy is not None, "squares": objective.reads_squares}
        score = self._schedule.scores(**wanted)

        def keep(number: int, tensors: MicroBatchTensors, scored: ScoredTokens) -> tuple[Tensor, dict[str, float]]:
            indices = part.batches[number].indices
            chosen = [part.samples[index] for index in indices]
            reference = part.reference.get(number)
            inputs = loss_inputs(objective, chosen, scored, tensors.mask, tensors.padded, reference=reference)
            records.update(record(objective, inputs, [start + index for index in indices]))
            return scored.logprobs.sum(), {}

        recorded = self._trained
        for part in parts:
            if self._replay is not None:
                self._replay.begin(replays=True, trains=False)
            with self._dropping(recorded):
                self._schedule.run(
                    self._models,
                    part.batches,
                    part.samples,
                    keep,
                    progress,
                    score=score,
                    forward_only=True,
                    replay=self._replay,
                )
            recorded += len(part.batches)
            if self._replay is not None:
                self._replay.reroutes.take()
            start += len(part.samples)
        messages = all_gather_messages(pack_records(records) if reports_metrics() else [])
        return unpack_records([message for part in messages for message in part])

    def _loss_of(
        self,
        objective: StepObjective,
        part: Part,
        facts: StepFacts | None,
        start: int,
        number: int,
        tensors: MicroBatchTensors,
        scored: ScoredTokens,
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss of a micro-batch; `start` is the position of the part's first sequence in the facts."""
        indices = part.batches[number].indices
        chosen, places = [part.samples[index] for index in indices], [start + index for index in indices]
        inputs = loss_inputs(
            objective,
            chosen,
            scored,
            tensors.mask,
            tensors.padded,
            facts=facts,
            indices=places,
            reference=part.reference.get(number),
        )
        return objective.loss(inputs)

    def _measure_without_replay(
        self, samples: Sequence[TrainSample], batches: list[MicroBatch], progress: Callable[[], None]
    ) -> list[dict[str, float]]:
        """Mismatch without router replay, once per comparison interval, on the first micro-batch of each rank."""
        if self._replay is None or all(sample.routed_experts is None for sample in samples):
            return []
        if self._steps_to_comparison or self.micro_batches:
            return []
        self._steps_to_comparison = replay_metrics.COMPARISON_INTERVAL
        # The interleaved schedule of virtual stages takes a multiple of the pipeline stages.
        first = batches[: self._pipeline if self._virtual > 1 else 1]
        self._replay.begin(replays=False, trains=False)
        scored = self._schedule.score(self._models, first, samples, progress, replay=self._replay)
        measured = [replay_metrics.unreplayed_counts(self._replay.reroutes.take())]
        for number, logprobs in scored.items() if reports_metrics() else ():
            tensors = MicroBatchTensors.of(first[number], samples, self._device)
            rollout = tensors.padded([samples[index].masked("logprobs") for index in first[number].indices])
            measured.append(replay_metrics.unreplayed_mismatch(logprobs, rollout, tensors.mask))
        return measured

    def _gather_metrics(self, log_ratios: list[NDArray[Any]]) -> tuple[dict[str, float], list[NDArray[Any]]]:
        """Sum the metrics of the update over all ranks, and collect the log-ratios of all micro-batches.

        Metrics of micro-batches are equal on the ranks that share them, so one of these ranks reports them.
        """
        shared = (self._shared, log_ratios) if reports_metrics() else ([], [])
        gathered = all_gather_messages([*shared, self._local])
        norms: Iterable[dict[str, float]] = self._norms or repeat({})
        self.measured = [part | own for shared, _, _ in gathered for part, own in zip(shared, norms, strict=False)]
        metrics = add_metrics(part for shared, _, local in gathered for part in [*shared, *local])
        return metrics, [array for _, log_ratios, _ in gathered for array in log_ratios]

    def _train(
        self,
        batches: list[MicroBatch],
        samples: Sequence[TrainSample],
        loss_function: LossFunction,
        progress: Callable[[], None],
        score: Score,
    ) -> list[dict[str, float]]:
        """Accumulate the gradients of all micro-batches; returns metrics on the last stage.

        Where gradients are measured, the schedule gets as few micro-batches at once as it takes. The gradients of each
        rank are added up in the same order.
        """
        size, measured = len(batches), list[dict[str, float]]()
        if self.norms is not None:
            size = self._pipeline if self._virtual > 1 else 1
        for first in range(0, len(batches), size):
            if self._replay is not None:
                self._replay.begin(replays=True, trains=True)
            some = batches[first : first + size]

            def loss_of(number: int, *given: Any, first: int = first) -> tuple[Tensor, dict[str, float]]:
                return loss_function(first + number, *given)

            with self._dropping(self._trained):
                measured += self._schedule.run(
                    self._models, some, samples, loss_of, progress, score=score, replay=self._replay
                )
            self._trained += len(some)
            if self.norms is not None:
                self._norms += [self.norms()] * len(some)
        return measured
