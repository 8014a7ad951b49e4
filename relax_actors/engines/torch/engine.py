"""Training engine with torch in this process: AdamW, gradient clipping, micro-batches by token count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.algorithms.controllers import StepCoefficients
from relax_actors.algorithms.losses import sft_loss
from relax_actors.algorithms.schedules import scheduled_learning_rate
from relax_actors.algorithms.sequence_records import StepFacts
from relax_actors.config.schema import Config
from relax_actors.engines.protocols.samples import MicroBatchPlan, TrainSample, by_row
from relax_actors.engines.protocols.training import StepResult
from relax_actors.engines.torch import coefficient_tensors, replay_metrics
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.forward import Forward, device_of
from relax_actors.engines.torch.frozen import freeze
from relax_actors.engines.torch.host_memory import move_to_device, move_to_host
from relax_actors.engines.torch.micro_batch import MicroBatch
from relax_actors.engines.torch.model import build, copy_into, has_weights, read_folder, tensors_of
from relax_actors.engines.torch.objective import ScoredTokens, StepObjective
from relax_actors.engines.torch.optimized_model import AdamW, OptimizedModel, begin_write_state, write_state
from relax_actors.engines.torch.recompute import recompute_layers
from relax_actors.engines.torch.step_facts import Records, loss_inputs, needs_records, record, step_facts
from relax_actors.media.family import family_of
from relax_actors.runtime.seeds import derive_seed
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import LocalSource, WeightEncoder

REFERENCE = "reference.safetensors"


class TorchEngine:
    """Trains in one process on one device; implements `TrainingEngine`.

    Args:
        config: configuration of the run.
        replay_comparison_interval: steps between two comparisons with a pass without router replay; 0 for none. The
            comparison does not change the weights.

    Raises:
        ConfigError: the model cannot be built, trainer.freeze does not match it, or it has no supported router for
            trainer.router_replay, or no layers for trainer.recompute.
    """

    shards: ClassVar = 1

    def __init__(self, config: Config, *, replay_comparison_interval: int = replay_metrics.COMPARISON_INTERVAL) -> None:
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._config = config
        settings = config.trainer
        self._device = device_of(settings.device)
        self._dtype = getattr(torch, settings.precision)
        family = family_of(config.model_path)
        self._max_tokens = settings.max_tokens_per_microbatch
        temperature, shares = config.rollout.temperature, settings.share_prefixes
        self._forward = Forward(self._device, self._dtype, temperature, family, share_prefixes=shares)
        self._model = self._forward.prepare(build(config.model_path, seed=config.run.seed, device=self._device))
        freeze(self._model, settings.freeze)
        self._routers = Routers(self._model) if settings.router_replay else None
        if settings.recompute == "full":
            recompute_layers(self._model, self._routers)
        self._comparison_interval = replay_comparison_interval
        self._steps_to_comparison = 0
        self._reference: PreTrainedModel | None = None
        self._trained = OptimizedModel(self._model, AdamW.of_trainer(settings))
        source = LocalSource(partial(tensors_of, self._model), self._dtype, self._trained.moving)
        self._encoder = WeightEncoder(source, keep_base=config.publishes_deltas)
        self._coefficients = StepCoefficients(config.algorithm, settings)
        # Loss of the current update, and the sequences that it keeps until `step`.
        self._objective: StepObjective | None = None
        self._kept: list[Sequence[TrainSample]] = []

    @property
    def model(self) -> PreTrainedModel:
        """Model in training; every step changes its weights in place."""
        return self._model

    def initialise(self, seed: int) -> None:
        """Load the weights of the model folder, or initialise random ones; see `TrainingEngine`."""
        path = self._config.model_path
        if has_weights(path):
            copy_into(self._model, read_folder(self._model, path), str(path))
        else:
            copy_into(self._model, tensors_of(build(path, seed=seed)), "random initialisation")
        self._encoder.invalidate()
        self._trained.reset()
        self._coefficients = StepCoefficients(self._config.algorithm, self._config.trainer)

    def warm_start(
        self, samples: Sequence[TrainSample], learning_rate: float, progress: Callable[[], None]
    ) -> StepResult:
        """Take one supervised step; see `TrainingEngine`."""
        tokens = sum(sample.trained for sample in samples)

        def loss_of(plan: MicroBatchPlan) -> tuple[Tensor, dict[str, float]]:
            batch = self._forward.micro_batch(samples, plan)
            logprobs = self._forward.logprobs(self._model, batch, temperature=1.0)
            loss = sft_loss(logprobs, batch.mask, tokens)
            return loss, {"loss": float(loss.detach())}

        self._trained.backward(self._forward.plan(samples, self._max_tokens), loss_of, progress)
        return StepResult(self._update(learning_rate))

    def finish_warm_start(self) -> None:
        """Create a new optimizer, and the reference of the KL if the trainer computes it; see `TrainingEngine`."""
        self._trained.reset()
        if self._config.computes_reference:
            self._set_reference({name: tensor.clone() for name, tensor in tensors_of(self._model).items()})

    def _set_reference(self, tensors: dict[str, Tensor]) -> None:
        reference = self._forward.prepare(build(self._config.model_path, device=self._device))
        reference.requires_grad_(False)
        copy_into(reference, tensors, "reference")
        self._reference = reference

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Accumulate the gradients of sequences, or keep them until `step` if the loss needs the whole step."""
        if self._objective is None:
            self._objective = StepObjective(self._config.algorithm, self._coefficients.current)
        samples = self._with_reference(samples, progress)
        if self._objective.needs_whole_step:
            self._kept.append(samples)
            progress()
        else:
            self._train(self._objective, [samples], progress, seed=0)

    def _train(
        self, objective: StepObjective, parts: Sequence[Sequence[TrainSample]], progress: Callable[[], None], seed: int
    ) -> None:
        """Run forward and backward for the parts of a step, after a forward pass if the loss needs one."""
        samples = [sample for part in parts for sample in part]
        facts = None
        if needs_records(objective, samples):
            facts = step_facts(objective, samples, self._record(objective, parts, progress), seed)
        start = 0
        for part in parts:
            loss_of = partial(self._loss_of, objective, part, facts, start)
            self._trained.backward(self._forward.plan(part, self._max_tokens), loss_of, progress)
            start += len(part)

    @torch.no_grad()
    def _record(
        self, objective: StepObjective, parts: Sequence[Sequence[TrainSample]], progress: Callable[[], None]
    ) -> Records:
        """Run the forward pass before the backward passes, in the same micro-batches."""
        found, start = Records(), 0
        for part in parts:
            for plan in self._forward.plan(part, self._max_tokens):
                batch, chosen = self._forward.micro_batch(part, plan), [part[index] for index in plan.indices]
                scored = self._scored(batch, entropies=objective.top_entropy is not None)
                inputs = loss_inputs(objective, chosen, scored, batch.mask, partial(self._padded, batch))
                found |= record(objective, inputs, [start + index for index in plan.indices])
                progress()
            start += len(part)
        if self._routers is not None:
            self._routers.reroutes.take()
        return found

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
        rollout = self._padded(batch, [sample.masked("logprobs") for sample in chosen])
        replay_measured = self._measure_without_replay(batch, rollout)
        ids = None
        if objective.needs_teacher and chosen[0].teacher_top_ids is not None:
            ids = self._padded(batch, [sample.masked("teacher_top_ids") for sample in chosen])
        scored = self._scored(batch, entropies=objective.trains_entropy, ids=ids)
        if self._routers is not None:
            replay_measured |= self._routers.reroutes.take()
        padded, places = partial(self._padded, batch), [start + index for index in plan.indices]
        inputs = loss_inputs(objective, chosen, scored, batch.mask, padded, facts=facts, indices=places)
        loss, measured = objective.loss(inputs)
        return loss, measured | replay_measured

    def _scored(self, batch: MicroBatch, *, entropies: bool, ids: Tensor | None = None) -> ScoredTokens:
        """Compute log-probs of the trained tokens, and their entropies and log-probs of other tokens if asked for."""
        return self._forward.score_trained(self._model, batch, entropies=entropies, ids=ids, routers=self._routers)

    def _padded(self, batch: MicroBatch, arrays: Sequence[NDArray[Any]]) -> Tensor:
        return self._forward.padded(arrays, batch.width)

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute log-probs with the current weights; see `SupportsScore`."""
        return self._forward.score(self._model, samples, self._max_tokens, progress, self._routers)

    @torch.no_grad()
    def _measure_without_replay(self, batch: MicroBatch, rollout: Tensor) -> dict[str, float]:
        """Measure a pass without replay, for the first micro-batch of a step, once per comparison interval."""
        if self._routers is None or batch.experts is None or self._trained.measured:
            return {}
        if not self._comparison_interval or self._steps_to_comparison:
            return {}
        self._steps_to_comparison = self._comparison_interval
        logprobs = self._forward.logprobs(self._model, batch, routers=self._routers, only_count=True)
        counts = replay_metrics.unreplayed_counts(self._routers.reroutes.take())
        return replay_metrics.unreplayed_mismatch(logprobs, rollout, batch.mask) | counts

    def discard(self) -> None:
        """Discard the accumulated gradients; see `TrainingEngine`."""
        self._objective = None
        self._kept.clear()
        self._trained.discard()

    def step(self, step: int, progress: Callable[[], None]) -> StepResult:
        """Take one optimizer step; see `TrainingEngine`."""
        objective = self._objective
        if objective is None:
            msg = f"no rows were accumulated for step {step}; call accumulate first"
            raise ValueError(msg)
        if self._kept:
            self._train(objective, self._kept, progress, derive_seed(self._config.run.seed, "tokens", step))
        rate = scheduled_learning_rate(self._config, step)
        measured = self._update(rate, objective.gradient_scale)
        self._coefficients.record(measured)
        self._steps_to_comparison = max(0, self._steps_to_comparison - 1)
        progress()
        return StepResult(objective.metrics(measured) | {"learning_rate": rate})

    def _with_reference(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> Sequence[TrainSample]:
        """Add reference log-probs if this engine computes them; in a deterministic run row by row, as actors do."""
        if self._reference is None or samples[0].reference_logprobs is not None:
            return samples
        parts = by_row(samples) if self._config.run.deterministic else [samples]
        found: list[TrainSample] = []
        for part in parts:
            scored = self._forward.score(self._reference, part, self._max_tokens, progress)
            found += [replace(s, reference_logprobs=logprobs) for s, logprobs in zip(part, scored, strict=True)]
        return found

    def _update(
        self, learning_rate: float, scale_of: Callable[[dict[str, float]], float] = lambda _: 1.0
    ) -> dict[str, float]:
        measured = self._trained.update(learning_rate, scale_of)
        self._objective = None
        self._kept.clear()
        self._encoder.invalidate()
        return measured

    def release_memory(self) -> int:
        """Move weights, gradients and the optimizer's state to host memory; see `ReleasesMemory`."""
        with self._trained.moving:
            return move_to_host(self._on_device())

    def resume_memory(self) -> int:
        """Move them back; see `ReleasesMemory`."""
        with self._trained.moving:
            return move_to_device(self._on_device(), self._device)

    def _on_device(self) -> Iterator[Tensor]:
        yield from self._trained.tensors()
        yield from self._encoder.copies()
        if self._reference is not None:
            yield from self._reference.parameters()

    def publish(self, *paths: Path) -> str:
        """Write the full weights; see `WeightProducer`."""
        return self._encoder.write_full(*paths)

    def delta(self) -> Callable[..., str] | None:
        """Return a function that writes the delta since `remember`; see `WeightProducer`."""
        return self._encoder.delta_writer()

    def remember(self) -> None:
        """Make the current weights the base of the next delta; see `WeightProducer`."""
        self._encoder.set_base()

    def fingerprint(self) -> str:
        """Return the fingerprint of the published weights; see `WeightProducer`."""
        return self._encoder.fingerprint()

    def save(self, folder: Path) -> None:
        """Write a checkpoint; see `TrainingEngine`."""
        write_state(self._config.trainer.precision, folder, self._state())

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Write a copy of the state in the background; see `SupportsAsyncSave`."""
        return begin_write_state(self._config.trainer.precision, folder, self._state(), unchanging=REFERENCE)

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a checkpoint by file name."""
        coefficients = coefficient_tensors.to_tensors(self._coefficients.current)
        found = self._trained.state() | {coefficient_tensors.FILE: coefficients}
        return found if self._reference is None else found | {REFERENCE: tensors_of(self._reference)}

    def load(self, folder: Path) -> None:
        """Load a checkpoint; see `TrainingEngine`."""
        self._trained.load(folder)
        self._coefficients.restore(coefficient_tensors.from_tensors(weights.load([folder / coefficient_tensors.FILE])))
        self._encoder.invalidate()
        if (folder / REFERENCE).exists():
            self._set_reference(weights.load([folder / REFERENCE]))

    def export(self, folder: Path) -> None:
        """Write a model folder; see `WeightProducer`."""
        model = self._model
        if self._dtype != torch.float32:
            model = build(self._config.model_path, dtype=self._dtype)
            with self._trained.moving:
                copy_into(model, tensors_of(self._model), "training")
        with weights.disk_errors(folder):
            model.save_pretrained(folder)
