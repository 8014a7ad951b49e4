"""Training engine of one Megatron-Core rank, alone or as a member of `MegatronGroup`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from relax_actors.algorithms.controllers import initial
from relax_actors.algorithms.first_pass import StepFacts
from relax_actors.algorithms.losses import add_metrics, sft_loss
from relax_actors.algorithms.schedules import scheduled_learning_rate
from relax_actors.config.schema import Config
from relax_actors.engines.megatron.architecture import Architecture
from relax_actors.engines.megatron.conversion import Conversion, SafetensorsReader
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import checkpoint, process_groups
from relax_actors.engines.megatron.mcore.frozen import freeze
from relax_actors.engines.megatron.mcore.micro_batches import MicroBatch, MicroBatchTensors
from relax_actors.engines.megatron.mcore.model_chunks import ModelChunks, padded_vocabulary
from relax_actors.engines.megatron.mcore.optimizer import Optimizer
from relax_actors.engines.megatron.mcore.rank_weights import RankWeights
from relax_actors.engines.megatron.mcore.replay import Replay
from relax_actors.engines.megatron.mcore.schedule import LossFunction, Schedule, Scored
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.training import StepResult
from relax_actors.engines.torch import replay_metrics
from relax_actors.engines.torch.model import build, copy_into, has_weights, tensors_of
from relax_actors.engines.torch.objective import ScoredTokens, StepObjective, check_gradient_norm
from relax_actors.engines.torch.step_facts import (
    Records,
    loss_inputs,
    needs_first_pass,
    pack_records,
    record,
    step_facts,
    unpack_records,
)
from relax_actors.runtime.seeds import derive_seed
from relax_actors.weights.encoder import WeightEncoder
from relax_actors.weights.protocols import WeightPayload


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a step: its sequences, this rank's micro-batches, and their reference log-probs by number."""

    samples: Sequence[TrainSample]
    batches: list[MicroBatch]
    reference: dict[int, Tensor]


class MegatronEngine:
    """One rank with its part of the model.

    Methods are collective: all ranks must call them in the same order with the same arguments. Only rank 0 writes
    published weights and exports; step metrics are the same on all ranks.

    Args:
        config: configuration of the run.
        rank: number of this process.
        store: rendezvous of the ranks; not needed with one rank.
    """

    def __init__(self, config: Config, rank: int = 0, store: Store | None = None) -> None:
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._config, self._rank = config, rank
        self._layout = layout = Layout.of(config.trainer.megatron)
        process_groups.check_device(config.trainer.device, "trainer.device")
        process_groups.initialise(layout, rank, store or HashStore())
        self._device = process_groups.device()
        self._architecture = Architecture.of(config.model_path)
        self._schedule = Schedule(config, self._architecture, layout)
        self._chunks = ModelChunks(config, self._architecture, layout)
        conversion = Conversion(self._architecture, padded_vocabulary(self._architecture, layout))
        self._weights = RankWeights(self._chunks.bare, conversion)
        freeze(self._chunks.bare, self._weights.parameters, conversion, config.trainer.freeze)
        self._optimizer = Optimizer(config, self._chunks)
        self._replay = None
        if config.trainer.router_replay:
            recomputed = config.trainer.megatron.recompute == "full"
            self._replay = Replay(self._chunks.bare, recomputed=recomputed, sequence_parallel=layout.sequence)
        self._reference: ModelChunks | None = None
        self._encoder = WeightEncoder(self._gather_weights, keep_base=config.publishes_deltas)
        self._published: dict[str, Tensor] | None = None
        self._steps_to_comparison = 0
        self._coefficients = initial(config.algorithm)
        # Of the current step: its loss, the parts kept until `step`, and the measurements and number of its
        # micro-batches so far.
        self._objective: StepObjective | None = None
        self._kept: list[Part] = []
        self._shared: list[dict[str, float]] = []
        self._local: list[dict[str, float]] = []
        self._micro_batches = 0

    def initialise(self, seed: int) -> None:
        """Load the model folder's weights, or draw random weights; see `TrainingEngine`."""
        path = self._config.model_path
        source: Mapping[str, Tensor]
        if has_weights(path):
            source = SafetensorsReader(sorted(path.glob("*.safetensors")))
        else:
            source = tensors_of(build(path, seed=seed))
        self._weights.load(source)
        self.discard()
        self._optimizer.reset()
        self._coefficients = initial(self._config.algorithm)
        self._weights_changed()

    def finish_warm_start(self) -> None:
        """Reset the optimizer and set the reference; see `TrainingEngine`."""
        self._optimizer.reset()
        if self._config.computes_reference:
            reference = self._new_reference()
            for frozen, trained in zip(reference.bare, self._chunks.bare, strict=True):
                frozen.load_state_dict(trained.state_dict())

    def _new_reference(self) -> ModelChunks:
        self._reference = ModelChunks(self._config, self._architecture, self._layout)
        for model in self._reference.wrapped:
            model.train(mode=False)
            model.requires_grad_(False)
        return self._reference

    def warm_start(
        self, samples: Sequence[TrainSample], learning_rate: float, progress: Callable[[], None]
    ) -> StepResult:
        """Take one supervised step; see `TrainingEngine`."""
        tokens = sum(sample.trained for sample in samples)

        def loss_function(_: int, tensors: MicroBatchTensors, scored: Scored) -> tuple[Tensor, dict[str, float]]:
            loss = sft_loss(scored[0], tensors.mask, tokens)
            return loss, {"loss": float(loss.detach())}

        self.discard()
        self._optimizer.zero_grad()
        batches = self._schedule.micro_batches(samples)
        self._shared += self._train(batches, samples, loss_function, progress, temperature=1.0)
        measured, _ = self._gather_metrics([])
        norm = self._step(learning_rate, 1.0)
        return StepResult(measured | {"grad_norm": norm, "micro_batches": float(len(batches))})

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Accumulate the gradients of sequences, or keep them until `step` if the loss needs the whole step."""
        if self._objective is None:
            self._optimizer.zero_grad()
            self._objective = StepObjective(self._config.algorithm, self._coefficients)
        part = self._part(samples, progress)
        if self._objective.needs_whole_step:
            self._kept.append(part)
        else:
            self._train_parts(self._objective, [part], progress, seed=0)

    def _part(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> Part:
        """Plan the micro-batches of a part of the step, and score them with the reference."""
        batches = self._schedule.micro_batches(samples)
        reference = self._score_reference(samples, batches, progress)
        self._local += self._measure_without_replay(samples, batches, progress)
        self._micro_batches += len(batches)
        return Part(samples, batches, reference)

    def _train_parts(
        self, objective: StepObjective, parts: Sequence[Part], progress: Callable[[], None], seed: int
    ) -> None:
        """Run forward and backward for the parts of a step, after a forward pass if the loss needs one."""
        samples = [sample for part in parts for sample in part.samples]
        facts = None
        if needs_first_pass(objective, samples):
            facts = step_facts(objective, samples, self._record(objective, parts, progress), seed)
        start = 0
        for part in parts:
            loss_function = partial(self._loss_of, objective, part, facts, start)
            entropies, batches = objective.trains_entropy, part.batches
            self._shared += self._train(batches, part.samples, loss_function, progress, entropies=entropies)
            if self._replay is not None:
                self._local.append(self._replay.reroutes.take())
            start += len(part.samples)

    @torch.no_grad()
    def _record(self, objective: StepObjective, parts: Sequence[Part], progress: Callable[[], None]) -> Records:
        """Run the forward pass before the backward passes; records of all ranks."""
        found: Records = {}
        start = 0

        def keep(number: int, tensors: MicroBatchTensors, scored: Scored) -> tuple[Tensor, dict[str, float]]:
            indices = part.batches[number].indices
            chosen = [part.samples[index] for index in indices]
            inputs = loss_inputs(objective, chosen, ScoredTokens(*scored), tensors.mask, tensors.padded)
            found.update(record(objective, inputs, [start + index for index in indices]))
            return scored[0].sum(), {}

        for part in parts:
            if self._replay is not None:
                self._replay.begin(replays=True, trains=False)
            self._schedule.run(
                self._optimizer.models,
                part.batches,
                part.samples,
                keep,
                progress,
                forward_only=True,
                entropies=objective.top_entropy is not None,
                replay=self._replay,
            )
            if self._replay is not None:
                self._replay.reroutes.take()
            start += len(part.samples)
        messages = process_groups.all_gather_messages(pack_records(found) if self._reports_metrics else [])
        return unpack_records([message for part in messages for message in part])

    def _loss_of(
        self,
        objective: StepObjective,
        part: Part,
        facts: StepFacts | None,
        start: int,
        number: int,
        tensors: MicroBatchTensors,
        scored: Scored,
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss of a micro-batch; `start` is the position of the part's first sequence in the facts."""
        indices = part.batches[number].indices
        chosen, places = [part.samples[index] for index in indices], [start + index for index in indices]
        inputs = loss_inputs(
            objective,
            chosen,
            ScoredTokens(*scored),
            tensors.mask,
            tensors.padded,
            facts=facts,
            indices=places,
            reference=part.reference.get(number),
        )
        return objective.loss(inputs)

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute log-probs with the current weights, the same on all ranks; see `SupportsScore`."""
        batches = self._schedule.micro_batches(samples)
        if self._replay is not None:
            self._replay.begin(replays=True, trains=False)
        scored = self._schedule.score(self._optimizer.models, batches, samples, progress, self._replay)
        own = [
            (index, row[: samples[index].trained])
            for number, logprobs in scored.items()
            for index, row in zip(batches[number].indices, logprobs.cpu().numpy(), strict=False)
        ]
        found: list[NDArray[Any]] = [np.zeros(len(sample), np.float32) for sample in samples]
        for part in process_groups.all_gather_messages(own if self._reports_metrics else []):
            for index, logprobs in part:
                found[index][samples[index].loss_mask] = logprobs
        return found

    def discard(self) -> None:
        """Discard the accumulated gradients; see `TrainingEngine`."""
        self._objective, self._micro_batches = None, 0
        self._kept = []
        self._shared, self._local = [], []

    def step(self, step: int, progress: Callable[[], None]) -> StepResult:
        """Take one optimizer step; see `TrainingEngine`."""
        objective, count = self._objective, float(self._micro_batches)
        if objective is None:
            msg = f"no rows were accumulated for step {step}; call accumulate first"
            raise ValueError(msg)
        if self._kept:
            self._train_parts(objective, self._kept, progress, derive_seed(self._config.run.seed, "tokens", step))
        rate = scheduled_learning_rate(self._config, step)
        measured, objective.log_ratios = self._gather_metrics(objective.log_ratios)
        norm = self._step(rate, objective.gradient_scale(measured))
        self._coefficients = objective.next_coefficients(measured)
        self._steps_to_comparison = max(0, self._steps_to_comparison - 1)
        progress()
        return StepResult(
            objective.metrics(measured) | {"grad_norm": norm, "micro_batches": count, "learning_rate": rate}
        )

    def _score_reference(
        self, samples: Sequence[TrainSample], batches: list[MicroBatch], progress: Callable[[], None]
    ) -> dict[int, Tensor]:
        """Log-probs of the reference by micro-batch number, if this engine computes them."""
        if self._reference is None or _has_reference(samples):
            return {}
        return self._schedule.score(self._reference.wrapped, batches, samples, progress)

    def _measure_without_replay(
        self, samples: Sequence[TrainSample], batches: list[MicroBatch], progress: Callable[[], None]
    ) -> list[dict[str, float]]:
        """Mismatch without router replay, once per comparison interval, on the first micro-batch of each rank."""
        if self._replay is None or all(sample.routed_experts is None for sample in samples):
            return []
        if self._steps_to_comparison or self._micro_batches:
            return []
        self._steps_to_comparison = replay_metrics.COMPARISON_INTERVAL
        # The interleaved schedule of virtual stages takes a multiple of the pipeline stages.
        first = batches[: self._layout.pipeline if self._layout.virtual > 1 else 1]
        self._replay.begin(replays=False, trains=False)
        scored = self._schedule.score(self._optimizer.models, first, samples, progress, self._replay)
        measured = [replay_metrics.unreplayed_counts(self._replay.reroutes.take())]
        for number, logprobs in scored.items() if self._reports_metrics else ():
            tensors = MicroBatchTensors.of(first[number], samples, self._device)
            rollout = tensors.padded([samples[index].masked("logprobs") for index in first[number].indices])
            measured.append(replay_metrics.unreplayed_mismatch(logprobs, rollout, tensors.mask))
        return measured

    @property
    def _reports_metrics(self) -> bool:
        """Whether this rank reports for all ranks that computed the same losses."""
        return bool(
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        )

    def _gather_metrics(self, log_ratios: list[NDArray[Any]]) -> tuple[dict[str, float], list[NDArray[Any]]]:
        """Sum the metrics of the step over all ranks, and collect the log-ratios of all micro-batches.

        Metrics of micro-batches are equal on the ranks that share them, so one of these ranks reports them.
        """
        shared = (self._shared, log_ratios) if self._reports_metrics else ([], [])
        gathered = process_groups.all_gather_messages([*shared, self._local])
        metrics = add_metrics(part for shared, _, local in gathered for part in [*shared, *local])
        return metrics, [array for _, log_ratios, _ in gathered for array in log_ratios]

    def _train(
        self,
        batches: list[MicroBatch],
        samples: Sequence[TrainSample],
        loss_function: LossFunction,
        progress: Callable[[], None],
        *,
        temperature: float | None = None,
        entropies: bool = False,
    ) -> list[dict[str, float]]:
        """Accumulate the gradients of all micro-batches; returns metrics on the last stage."""
        if self._replay is not None:
            self._replay.begin(replays=True, trains=True)
        models = self._optimizer.models
        return self._schedule.run(
            models,
            batches,
            samples,
            loss_function,
            progress,
            temperature=temperature,
            entropies=entropies,
            replay=self._replay,
        )

    def _step(self, rate: float, factor: float) -> float:
        norm = self._optimizer.step(rate, factor)
        self.discard()
        check_gradient_norm(norm)
        self._weights_changed()
        return norm

    def _weights_changed(self) -> None:
        self._published = None
        self._encoder.invalidate()

    def _gather_weights(self) -> dict[str, Tensor]:
        """Weights to publish, on rank 0. Collective if the weights have changed since the last call."""
        if self._published is None:
            self._published = dict(self._weights.gather())
        return self._published

    def publish(self, path: Path) -> str:
        """Write the weights and return their fingerprint, on rank 0; other ranks return "". See `WeightProducer`."""
        self._gather_weights()
        return self._encoder.write_full(path) if self._rank == 0 else ""

    def delta(self) -> Callable[[Path], str] | None:
        """Writer of the change since `remember`, on rank 0; see `WeightProducer`."""
        self._gather_weights()
        return self._encoder.delta_writer() if self._rank == 0 else None

    def remember(self) -> None:
        """Keep the weights as the base of the next delta; see `WeightProducer`."""
        self._gather_weights()
        if self._rank == 0:
            self._encoder.set_base()

    def payloads(self) -> list[WeightPayload]:
        """Weights in memory; see `PayloadProducer`."""
        return self._encoder.payloads()

    def fingerprint(self) -> str:
        """Fingerprint of the weights, on rank 0; see `WeightProducer`."""
        self._gather_weights()
        return self._encoder.fingerprint() if self._rank == 0 else ""

    def save(self, folder: Path) -> None:
        """Write a checkpoint, each rank its shards; see `TrainingEngine`."""
        checkpoint.save(folder, self._layout, self._optimizer, self._reference, self._coefficients)

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Write a checkpoint in the background, each rank its shards; see `SupportsAsyncSave`."""
        return checkpoint.begin_save(folder, self._layout, self._optimizer, self._reference, self._coefficients)

    def load(self, folder: Path) -> None:
        """Load a checkpoint that any layout wrote; see `TrainingEngine`."""
        reference = self._new_reference() if checkpoint.has_reference(folder) else None
        self._coefficients = checkpoint.load(folder, self._layout, self._optimizer, reference)
        self.discard()
        self._weights_changed()

    def export(self, folder: Path) -> None:
        """Write a model folder on rank 0; see `WeightProducer`."""
        tensors = self._gather_weights()
        if self._rank == 0:
            model = build(self._config.model_path, dtype=getattr(torch, self._config.trainer.precision))
            copy_into(model, tensors, "training")
            model.save_pretrained(folder)


def _has_reference(samples: Sequence[TrainSample]) -> bool:
    """Whether the sequences of a step come with log-probs of the reference."""
    return samples[0].reference_logprobs is not None
