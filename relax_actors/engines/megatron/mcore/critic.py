"""Critic of one Megatron-Core rank, alone or as a member of `CriticGroup`."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from relax_actors.algorithms.losses import add_metrics
from relax_actors.algorithms.schedules import scheduled_learning_rate
from relax_actors.algorithms.values import measure_values, value_loss, value_metrics
from relax_actors.config.lora import LoraSection
from relax_actors.config.schema import Config
from relax_actors.config.training import CriticSection
from relax_actors.engines.megatron.architecture import architecture_of
from relax_actors.engines.megatron.folder_reader import SafetensorsReader, stored_weights
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import checkpoint, process_groups
from relax_actors.engines.megatron.mcore.adapter import MegatronAdapter, run_adapter
from relax_actors.engines.megatron.mcore.micro_batches import MicroBatchTensors
from relax_actors.engines.megatron.mcore.model_chunks import ModelChunks, conversion_of, critic_head
from relax_actors.engines.megatron.mcore.optimizer import Optimizer, movable
from relax_actors.engines.megatron.mcore.rank_weights import RankWeights, local_shards
from relax_actors.engines.megatron.mcore.schedule import Schedule
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.training import StepResult
from relax_actors.engines.ranks.collectives import all_gather_messages
from relax_actors.engines.ranks.model_folder import write_shared
from relax_actors.engines.torch.loss_inputs import ScoredTokens
from relax_actors.engines.torch.model import build_critic
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import ignore


class MegatronCritic:
    """One rank with its part of a value model; implements `CriticEngine`.

    Methods are collective: all ranks must call them in the same order with the same arguments. Metrics and values are
    the same on all ranks.

    Args:
        config: configuration of the run.
        settings: section [critic] of it.
        rank: number of this process.
        store: rendezvous of the ranks; not needed with one rank.
    """

    def __init__(self, config: Config, settings: CriticSection, rank: int = 0, store: Store | None = None) -> None:
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        config = _with_settings(config, settings)
        self._config, self._settings, self._rank = config, settings, rank
        self._path = settings.path or config.model_path
        self._layout = layout = Layout.of(settings.megatron)
        process_groups.choose_device(settings.device, "critic.device")
        process_groups.initialise(layout, rank, store or HashStore())
        architecture = architecture_of(self._path)
        self._schedule = Schedule(config, architecture, layout, has_logits=False)
        head = critic_head(config, self._path)
        self._head_shapes = head.shapes(architecture.hidden_size)
        chunks = ModelChunks(config, architecture, layout, head=head, folder=self._path)
        self._conversion = conversion_of(self._path, architecture, layout, head)
        self._adapter: MegatronAdapter | None = None
        if config.lora is not None:
            self._adapter = self._with_adapter(config.lora, chunks)
            self._weights = self._adapter.weights
        else:
            self._weights = RankWeights(local_shards(chunks.bare), self._conversion)
        self._optimizer = Optimizer(config, chunks)
        self._weights.reading = self._memory = movable(chunks, self._optimizer)
        self._fingerprint: str | None = None
        self._measured: list[dict[str, float]] = []
        self._micro_batches = 0

    def _with_adapter(self, section: LoraSection, chunks: ModelChunks) -> MegatronAdapter:
        """Load the base, of the policy or of critic.path, and give it an adapter of its own; the head is trained."""
        head = self._zero_head()
        stored: Mapping[str, Tensor] = stored_weights(self._path)
        if self._settings.path is None:
            stored = ChainMap(head, stored)  # type: ignore[arg-type]  # is only read
        return run_adapter(self._config, section, chunks, self._conversion, (self._path, stored))

    def _zero_head(self) -> dict[str, Tensor]:
        return {name: torch.zeros(shape) for name, shape in self._head_shapes.items()}

    def initialise(self, policy: Sequence[Path] | None) -> None:
        """Initialise the weights and the optimizer; see `CriticEngine`."""
        if policy is not None and self._adapter is not None:
            tensors = {name: t for name, t in weights.load(policy).items() if name in self._adapter.names}
            self._adapter.load(tensors | self._zero_head(), "version 0 of the policy")
        elif policy is not None:
            self._weights.load(ChainMap(self._zero_head(), SafetensorsReader(list(policy))))  # type: ignore[arg-type]
        elif self._adapter is not None:
            self._adapter.draw(self._config.run.seed)
        else:
            self._weights.load(stored_weights(self._path))
        self.discard()
        self._optimizer.reset()
        self._fingerprint = None

    def values(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute the value of the state before each trained token; see `CriticEngine`."""
        schedule = self._schedule
        return schedule.score_everywhere(self._optimizer.models, samples, progress, score=schedule.numbers)

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Accumulate the gradients of the value loss; see `AccumulatesSteps`."""
        if not self._micro_batches:
            self._optimizer.zero_grad()
        batches = self._schedule.micro_batches(samples)

        def loss_of(number: int, tensors: MicroBatchTensors, found: ScoredTokens) -> tuple[Tensor, dict[str, float]]:
            chosen, values = [samples[index] for index in batches[number].indices], found.logprobs
            old, returns = (tensors.padded([s.masked(name) for s in chosen]) for name in ("values", "returns"))
            loss = value_loss(values, old, returns, clip=self._settings.value_clip)
            return loss.loss.masked_fill(~tensors.mask, 0.0).sum(), measure_values(values, returns, loss, tensors.mask)

        models, score, updates = self._optimizer.models, self._schedule.numbers, self._optimizer.updates
        with nullcontext() if self._adapter is None else self._adapter.dropping(updates, self._micro_batches):
            self._measured += self._schedule.run(models, batches, samples, loss_of, progress, score=score)
        self._micro_batches += len(batches)

    def discard(self) -> None:
        """Discard the accumulated gradients; see `AccumulatesSteps`."""
        self._measured, self._micro_batches = [], 0

    def step(self, step: int, progress: Callable[[], None]) -> StepResult:
        """Update the critic; see `AccumulatesSteps`."""
        if not self._micro_batches:
            msg = f"no rows were accumulated for step {step}; call accumulate first"
            raise ValueError(msg)
        own = self._measured if process_groups.reports_metrics() else []
        measured = add_metrics(each for part in all_gather_messages(own) for each in part)
        rate = scheduled_learning_rate(self._config, step, self._settings.learning_rate)
        of_update = self._optimizer.step(rate, 1.0 / max(measured["tokens"], 1.0), measured)
        count = float(self._micro_batches)
        self.discard()
        self._fingerprint = None
        progress()
        return StepResult(value_metrics(measured | of_update | {"micro_batches": count, "learning_rate": rate}))

    def fingerprint(self) -> str:
        """Return the fingerprint of the weights."""
        if self._fingerprint is None:
            self._fingerprint = self._weights.visit(ignore, self._layout.ranks)
        return self._fingerprint

    def release_memory(self, folder: Path | None) -> int:
        """Move weights, gradients and the optimizer's state off the device; see `ReleasesMemory`."""
        return self._memory.release(folder)

    def resume_memory(self) -> int:
        """Move them back; see `ReleasesMemory`."""
        return self._memory.resume()

    def _state(self) -> checkpoint.RankState:
        return checkpoint.RankState(self._layout, self._weights, self._optimizer)

    def save(self, folder: Path) -> None:
        """Write a checkpoint, each rank its shards; see `SavesState`."""
        checkpoint.save(folder, self._state())

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Write a checkpoint in the background, each rank its shards; see `SupportsAsyncSave`."""
        return checkpoint.begin_save(folder, self._state())

    def load(self, folder: Path) -> None:
        """Load a checkpoint that any layout wrote; see `SavesState`."""
        checkpoint.load(folder, self._state())
        if self._adapter is not None:
            self._adapter.check(str(folder))
        self.discard()
        self._fingerprint = None

    def export(self, folder: Path) -> None:
        """Write a folder that critic.path can name, each rank its share; see `CriticEngine`."""
        make = partial(build_critic, self._path, seed=0)
        with self._memory:
            if self._adapter is not None:
                self._adapter.export_merged(folder, make, self._config.trainer.precision)
            else:
                write_shared(folder, make, self._weights, self._config.trainer.precision)


def _with_settings(config: Config, settings: CriticSection) -> Config:
    """Return the configuration with the critic's model and optimizer in [trainer]."""
    own = {
        "megatron": settings.megatron,
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
    }
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=own)})
