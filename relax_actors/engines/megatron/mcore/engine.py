"""Training engine of one Megatron-Core rank, alone or as a member of `TrainerGroup`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from relax_actors.algorithms.controllers import StepCoefficients
from relax_actors.algorithms.schedules import scheduled_learning_rate
from relax_actors.config.schema import Config
from relax_actors.engines.megatron.architecture import architecture_of
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import checkpoint, process_groups
from relax_actors.engines.megatron.mcore.adapter import MegatronAdapter, run_adapter
from relax_actors.engines.megatron.mcore.frozen import freeze
from relax_actors.engines.megatron.mcore.gradients import Gradients
from relax_actors.engines.megatron.mcore.model_chunks import ModelChunks, base_weights, conversion_of, trained_head
from relax_actors.engines.megatron.mcore.optimizer import Optimizer, movable
from relax_actors.engines.megatron.mcore.rank_weights import RankWeights, local_shards
from relax_actors.engines.megatron.mcore.reference import AdapterReference, ModelReference, Reference
from relax_actors.engines.megatron.mcore.replay import Replay
from relax_actors.engines.megatron.mcore.schedule import Schedule
from relax_actors.engines.megatron.mcore.update import Update
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.training import StepResult
from relax_actors.engines.ranks.model_folder import write_shared
from relax_actors.engines.torch.model import has_weights, tensors_of
from relax_actors.engines.torch.profile import Profiled
from relax_actors.engines.torch.score_model import exported_model, model_maker
from relax_actors.runtime.seeds import derive_seed
from relax_actors.weights.encoder import WeightEncoder


class MegatronEngine(Profiled):
    """One rank with its part of the model.

    Methods are collective: all ranks must call them in the same order with the same arguments. Step metrics are the
    same on all ranks.

    Args:
        config: configuration of the run.
        rank: number of this process.
        store: rendezvous of the ranks; not needed with one rank.
    """

    def __init__(self, config: Config, rank: int = 0, store: Store | None = None) -> None:
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._config, self._rank = config, rank
        self._layout = layout = Layout.of(config.trainer.megatron)
        process_groups.choose_device(config.trainer.device, "trainer.device")
        process_groups.initialise(layout, rank, store or HashStore())
        self._device = process_groups.device()
        self._architecture = architecture_of(config.model_path)
        head = trained_head(config)
        self._schedule = Schedule(config, self._architecture, layout, has_logits=head is None)
        self._chunks = ModelChunks(config, self._architecture, layout, head=head)
        conversion = conversion_of(config.model_path, self._architecture, layout, head)
        self._adapter: MegatronAdapter | None = None
        if config.lora is not None:
            base = config.model_path, base_weights(config, config.run.seed)
            self._adapter = run_adapter(config, config.lora, self._chunks, conversion, base)
            self._weights = self._adapter.weights
        else:
            self._weights = RankWeights(local_shards(self._chunks.bare), conversion)
            freeze(self._chunks.bare, self._weights.parameters, conversion, config.trainer.freeze)
        self._optimizer = Optimizer(config, self._chunks)
        self._replay = None
        if config.trainer.router_replay:
            recomputed = config.trainer.recompute == "full"
            self._replay = Replay(self._chunks.bare, recomputed=recomputed, sequence_parallel=layout.sequence)
        self._update = Update(config, self._optimizer.models, self._schedule, self._replay, self._dropping)
        self._memory = movable(self._chunks, self._optimizer, self._beside)
        self._weights.reading = self._memory
        self._encoder = WeightEncoder(self._weights, keep_base=config.publishes_deltas, reading=self._memory)
        self._coefficients = StepCoefficients(config.algorithm, config.trainer)

    def _dropping(self, part: int) -> AbstractContextManager[None]:
        return nullcontext() if self._adapter is None else self._adapter.dropping(self._optimizer.updates, part)

    def initialise(self, seed: int) -> None:
        """Load the model folder's weights, or draw random weights; see `TrainingEngine`."""
        path = self._config.model_path
        if self._adapter is not None:
            self._adapter.initialise(seed)
        elif has_weights(path):
            self._weights.load(base_weights(self._config, seed))
        else:
            self._weights.load(tensors_of(model_maker(self._config)(seed=seed)))
        self.discard()
        self._optimizer.reset()
        self._coefficients = StepCoefficients(self._config.algorithm, self._config.trainer)
        self._encoder.invalidate()

    def finish_warm_start(self) -> None:
        """Reset the optimizer and set the reference; see `TrainingEngine`."""
        self._optimizer.reset()
        if self._config.computes_reference:
            self._set_reference()

    def _set_reference(self) -> None:
        """Make the current weights those of the reference."""
        if self._adapter is not None:
            reference: Reference = AdapterReference(self._adapter, self._optimizer.models)
        else:
            second = ModelChunks(self._config, self._architecture, self._layout)
            reference = ModelReference(second, self._chunks)
        reference.take()
        self._update.reference = reference

    def warm_start(
        self, samples: Sequence[TrainSample], learning_rate: float, progress: Callable[[], None]
    ) -> StepResult:
        """Take one supervised step; see `TrainingEngine`."""
        self.discard()
        self._optimizer.zero_grad()
        self._update.accumulate_supervised(samples, progress)
        measured, count = self._update.finish(progress, seed=0), float(self._update.micro_batches)
        of_update = self._step(learning_rate, 1.0, measured)
        return StepResult(measured | of_update | {"micro_batches": count})

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Accumulate the gradients of sequences, or keep them until `step` if the loss needs the whole step."""
        if self._update.objective is None:
            self._optimizer.zero_grad()
            self._update.begin(self._coefficients.current)
        self._update.accumulate(samples, progress)

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute log-probs with the current weights, the same on all ranks; see `SupportsScore`."""
        if self._replay is not None:
            self._replay.begin(replays=True, trains=False)
        return self._schedule.score_everywhere(self._optimizer.models, samples, progress, replay=self._replay)

    def discard(self) -> None:
        """Discard the accumulated gradients; see `TrainingEngine`."""
        self._update.discard()

    def step(self, step: int, progress: Callable[[], None]) -> StepResult:
        """Take one optimizer step; see `TrainingEngine`."""
        objective, count = self._update.objective, float(self._update.micro_batches)
        if objective is None:
            msg = f"no rows were accumulated for step {step}; call accumulate first"
            raise ValueError(msg)
        measured = self._update.finish(progress, derive_seed(self._config.run.seed, "tokens", step))
        rate = scheduled_learning_rate(self._config, step)
        of_update = self._step(rate, objective.gradient_scale(measured), measured)
        self._coefficients.record(measured)
        progress()
        metrics = objective.metrics(measured) | of_update | {"micro_batches": count, "learning_rate": rate}
        return StepResult(metrics, self._update.measured)

    def _step(self, rate: float, factor: float, measured: Mapping[str, float]) -> dict[str, float]:
        of_update = self._optimizer.step(rate, factor, measured)
        self.discard()
        self._encoder.invalidate()
        return of_update

    def _beside(self) -> list[Tensor]:
        """Return copies of published weights, and the weights of the reference."""
        reference = self._update.reference
        return [*self._encoder.copies(), *(() if reference is None else reference.resident())]

    def release_memory(self, folder: Path | None) -> int:
        """Move weights, gradients and the optimizer's state off the device; see `ReleasesMemory`."""
        return self._memory.release(folder)

    def resume_memory(self) -> int:
        """Move them back; see `ReleasesMemory`."""
        return self._memory.resume()

    @property
    def shards(self) -> int:
        """Files of a version, one for each rank; see `WeightProducer`."""
        return self._layout.ranks

    def publish(self, *paths: Path) -> str:
        """Write the weights, each rank its share, and return their fingerprint; see `WeightProducer`."""
        return self._encoder.write_full(*paths)

    def delta(self) -> Callable[..., str] | None:
        """Writer of the change since `remember`, each rank its share; see `WeightProducer`."""
        return self._encoder.delta_writer()

    def remember(self) -> None:
        """Keep the weights as the base of the next delta; see `WeightProducer`."""
        self._encoder.set_base()

    def fingerprint(self) -> str:
        """Fingerprint of the weights; see `WeightProducer`."""
        return self._encoder.fingerprint()

    def prefixes(self) -> bytes:
        """Digests of the first tensors; see `SupportsPrefixes`."""
        return self._encoder.prefixes()

    def measure_gradients(self) -> None:
        """Measure the gradients of each micro-batch, unless stages share towers; see `MeasuresGradients`."""
        if self._optimizer.gradients_are_whole:
            self._update.norms = Gradients(self._optimizer, self._weights).norms

    def _state(self) -> checkpoint.RankState:
        reference = self._update.reference
        shards = {} if reference is None else reference.shards()
        return checkpoint.RankState(self._layout, self._weights, self._optimizer, shards)

    def save(self, folder: Path) -> None:
        """Write a checkpoint, each rank its shards; see `TrainingEngine`."""
        checkpoint.save(folder, self._state(), self._coefficients.current)

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Write a checkpoint in the background, each rank its shards; see `SupportsAsyncSave`."""
        return checkpoint.begin_save(folder, self._state(), self._coefficients.current)

    def load(self, folder: Path) -> None:
        """Load a checkpoint that any layout wrote; see `TrainingEngine`."""
        if checkpoint.has_reference(folder) or (self._adapter is not None and self._config.computes_reference):
            self._set_reference()  # whose weights, if it has any, are those of the checkpoint
        checkpoint.load(folder, self._state())
        if self._adapter is not None:
            self._adapter.check(str(folder))
        self._coefficients.restore(checkpoint.coefficients_of(folder))
        self.discard()
        self._encoder.invalidate()

    def export(self, folder: Path) -> None:
        """Write a model folder, or that of an adapter, each rank its share; see `WeightProducer`."""
        make, section = partial(exported_model, self._config), self._config.lora
        with self._memory:
            if self._adapter is not None and section is not None:
                self._adapter.export(folder, self._config, make, merged=section.export_merged)
            else:
                write_shared(folder, make, self._weights, self._config.trainer.precision)
