"""Training engine with torch in this process: AdamW, gradient clipping, micro-batches by token count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import Store
from transformers import PreTrainedModel

from relax_actors.algorithms.controllers import StepCoefficients
from relax_actors.algorithms.losses import sft_loss
from relax_actors.algorithms.schedules import scheduled_learning_rate
from relax_actors.config.schema import Config
from relax_actors.engines.protocols.samples import MicroBatchPlan, TrainSample, by_row
from relax_actors.engines.protocols.training import StepResult
from relax_actors.engines.ranks.model_folder import write_shared
from relax_actors.engines.torch import coefficient_tensors, replay_metrics
from relax_actors.engines.torch.adapter import Adapter, run_weights
from relax_actors.engines.torch.adapter_folder import export_adapter
from relax_actors.engines.torch.background import run_in_background
from relax_actors.engines.torch.devices import sharding_of
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.fake_quant import GridWeights
from relax_actors.engines.torch.forward import Forward
from relax_actors.engines.torch.frozen import freeze
from relax_actors.engines.torch.model import copy_into, has_weights, read_folder, tensors_of
from relax_actors.engines.torch.objective import StepObjective
from relax_actors.engines.torch.optimized_model import AdamW, OptimizedModel
from relax_actors.engines.torch.passes import Passes
from relax_actors.engines.torch.profile import Profiled
from relax_actors.engines.torch.recompute import recompute_layers
from relax_actors.engines.torch.reference import AdapterReference, Reference, ReferenceModel
from relax_actors.engines.torch.score_model import complete_config, exported_model, model_maker, stored_scores
from relax_actors.media.family import family_of
from relax_actors.runtime.seeds import derive_seed
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import WeightEncoder

REFERENCE = "reference.safetensors"


class TorchEngine(Profiled):
    """One rank, alone or with others that share the model with it; implements `TrainingEngine` and `RankEngine`.

    Args:
        config: configuration of the run.
        rank: number of this process.
        store: rendezvous of the ranks; not needed with one rank.
        replay_comparison_interval: steps between two comparisons with a pass without router replay; 0 for none. The
            comparison does not change the weights.

    Raises:
        ConfigError: the model cannot be built, trainer.freeze does not match it, or it has no supported router for
            trainer.router_replay, or no layers for trainer.recompute.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        store: Store | None = None,
        *,
        replay_comparison_interval: int = replay_metrics.COMPARISON_INTERVAL,
    ) -> None:
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._config = config
        settings = config.trainer
        self._dtype, head_dtype = getattr(torch, settings.precision), getattr(torch, config.head_precision)
        self._sharding = sharding_of(settings.torch, settings.device, self._dtype, rank, store, head_dtype)
        self._device = self._sharding.device
        self._family = family = family_of(config.model_path)
        self._max_tokens = settings.max_tokens_per_microbatch
        temperature, shares = config.rollout.temperature, settings.share_prefixes
        self._forward = Forward(
            self._sharding,
            self._dtype,
            temperature,
            family,
            share_prefixes=shares,
            keeps_rows=config.algorithm.compares_answers,
            head_dtype=head_dtype,
            scores=config.algorithm.trains_scores,
        )
        self._make = model_maker(config)
        self._model = self._sharding.build(partial(self._built, config.run.seed), family)
        freeze(self._model, settings.freeze)
        own = run_weights(config, self._model, self._device)
        self._adapter = own if isinstance(own, Adapter) else None
        self._forward.prepare(self._model)
        if self._adapter is not None and self._dtype != torch.float32 and self._sharding.is_whole:
            self._adapter.cast(self._dtype)
        self._routers = Routers(self._model) if settings.router_replay else None
        if settings.recompute == "full":
            recompute_layers(self._model, self._routers)
        self._reference: Reference | None = None
        quant = settings.fake_quant
        grid = None if quant is None else GridWeights(self._model, quant, self._sharding)
        self._trained = OptimizedModel(self._model, own, AdamW.of_trainer(settings), self._sharding, grid)
        self._passes = Passes(
            self._forward, self._trained, self._sharding, self._routers, self._max_tokens, replay_comparison_interval
        )
        self._source = self._sharding.source(own.tensors, self._dtype, self._trained.memory)
        reading = None if self._sharding.is_whole else self._trained.memory
        self._encoder = WeightEncoder(self._source, keep_base=config.publishes_deltas, reading=reading)
        self._trained.beside += [self._encoder.copies, self._of_reference]
        self._coefficients = StepCoefficients(config.algorithm, settings)
        # Loss of the current update, and the sequences that it keeps until `step`.
        self._objective: StepObjective | None = None
        self._kept: list[Sequence[TrainSample]] = []
        # Waits for the thread that writes the last checkpoint, which reads the reference.
        self._end_save: Callable[[], None] = lambda: None

    @property
    def model(self) -> PreTrainedModel:
        """Model in training; every step changes its weights in place."""
        return self._model

    def _built(self, seed: int | None, device: torch.device | None) -> PreTrainedModel:
        return self._make(seed=seed, device=device)

    def initialise(self, seed: int) -> None:
        """Load the weights of the model folder, or initialise random ones; see `TrainingEngine`."""
        path, scores = self._config.model_path, self._config.algorithm.trains_scores
        if self._adapter is not None:
            self._adapter.initialise(seed)
        elif has_weights(path):
            stored = stored_scores(self._model, path, seed) if scores else read_folder(self._model, path)
            copy_into(self._model, stored, str(path))
        else:
            self._sharding.draw(self._model, partial(self._built, seed))
        self._trained.take_grid()
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

        self._passes.backward(samples, loss_of, progress)
        return StepResult(self._update(learning_rate))

    def finish_warm_start(self) -> None:
        """Create a new optimizer, and the reference of the KL if the trainer computes it; see `TrainingEngine`."""
        self._trained.reset()
        if self._config.computes_reference:
            self._reference = self._made_reference()
            self._reference.take()

    def _made_reference(self) -> Reference:
        """Return the reference, with any weights."""
        if self._adapter is not None:
            return AdapterReference(self._adapter, self._trained.memory)

        def build() -> PreTrainedModel:
            return self._forward.prepare(self._sharding.build(partial(self._built, None), self._family))

        return self._reference or ReferenceModel(self._model, build)

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Accumulate the gradients of sequences, or keep them until `step` if the loss needs the whole step."""
        if self._objective is None:
            self._objective = StepObjective(self._config.algorithm, self._coefficients.current)
        samples = self._with_reference(samples, progress)
        if self._objective.needs_whole_step:
            self._kept.append(samples)
            progress()
        else:
            self._passes.train(self._objective, [samples], progress, seed=0)

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute log-probs with the current weights; see `SupportsScore`."""
        return self._forward.score(self._model, samples, self._max_tokens, progress, self._routers)

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
            self._passes.train(objective, self._kept, progress, derive_seed(self._config.run.seed, "tokens", step))
        rate = scheduled_learning_rate(self._config, step)
        log_ratios = self._sharding.all_gather(objective.log_ratios)
        objective.log_ratios = [array for part in log_ratios for array in part]
        measured = self._update(rate, objective.gradient_scale)
        self._coefficients.record(measured)
        self._passes.end_step()
        progress()
        return StepResult(objective.metrics(measured) | {"learning_rate": rate}, self._trained.micro_batches)

    def measure_gradients(self) -> None:
        """Measure the gradients of each micro-batch; see `MeasuresGradients`."""
        self._trained.measures_gradients = True

    def _with_reference(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> Sequence[TrainSample]:
        """Add reference log-probs if this engine computes them; in a deterministic run row by row, as actors do."""
        if self._reference is None or samples[0].reference_logprobs is not None:
            return samples
        parts = by_row(samples) if self._config.run.deterministic else [samples]
        found: list[TrainSample] = []
        for part in parts:
            with self._reference.model() as model:
                scored = self._forward.score(model, part, self._max_tokens, progress)
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

    def release_memory(self, folder: Path | None) -> int:
        """Move weights, gradients and the optimizer's state off the device; see `ReleasesMemory`."""
        if not self._sharding.is_whole:
            end, self._end_save = self._end_save, lambda: None
            with suppress(Exception):  # the checkpointer raises it
                end()
        return self._trained.memory.release(folder)

    def resume_memory(self) -> int:
        """Move them back; see `ReleasesMemory`."""
        return self._trained.memory.resume()

    def _of_reference(self) -> Iterable[Tensor]:
        return () if self._reference is None else self._reference.resident()

    @property
    def shards(self) -> int:
        """Files of a version, one for each rank; see `WeightProducer`."""
        return self._sharding.count

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

    def prefixes(self) -> bytes:
        """Return the digests of the first tensors; see `SupportsPrefixes`."""
        return self._encoder.prefixes()

    def save(self, folder: Path) -> None:
        """Write a checkpoint; see `TrainingEngine`."""
        self._trained.writer(self._config.trainer.precision, self._state())(folder)

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Write a copy of the state in the background; see `SupportsAsyncSave`."""
        write = self._trained.writer(self._config.trainer.precision, self._state(), unchanging=REFERENCE)
        self._end_save = run_in_background(partial(write, folder))
        return self._end_save

    def _state(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors of a checkpoint by file name."""
        coefficients = coefficient_tensors.to_tensors(self._coefficients.current)
        found = self._trained.state() | {coefficient_tensors.FILE: coefficients}
        reference = None if self._reference is None else self._reference.tensors()
        return found if reference is None else found | {REFERENCE: reference}

    def load(self, folder: Path) -> None:
        """Load a checkpoint; see `TrainingEngine`."""
        self._trained.load(folder)
        self._coefficients.restore(coefficient_tensors.from_tensors(weights.load([folder / coefficient_tensors.FILE])))
        self._encoder.invalidate()
        has_file = (folder / REFERENCE).exists()
        if has_file or (self._adapter is not None and self._config.computes_reference):
            self._reference = self._made_reference()
            if has_file:
                self._reference.load(weights.load([folder / REFERENCE]))

    def export(self, folder: Path) -> None:
        """Write a model folder, or that of an adapter; see `WeightProducer`."""
        if self._adapter is not None:
            with self._trained.memory:
                export_adapter(self._adapter, folder, self._config, self._sharding)
            return
        if not self._sharding.is_whole:
            make = partial(exported_model, self._config)
            write_shared(folder, make, self._source, self._config.trainer.precision)
            return
        model = self._model
        if self._dtype != torch.float32:
            model = self._make(dtype=self._dtype)
            with self._trained.memory:
                copy_into(model, tensors_of(self._model), "training")
        complete_config(model, self._config)
        with weights.disk_errors(folder):
            model.save_pretrained(folder)
