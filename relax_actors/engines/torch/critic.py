"""Critic with torch in this process: the policy's architecture with a value head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import Store
from transformers import PreTrainedModel

from relax_actors.algorithms.schedules import scheduled_learning_rate
from relax_actors.algorithms.values import measure_values, value_loss, value_metrics
from relax_actors.config.lora import LoraSection
from relax_actors.config.schema import Config
from relax_actors.config.training import CriticSection
from relax_actors.engines.protocols.samples import MicroBatchPlan, TrainSample
from relax_actors.engines.protocols.training import StepResult
from relax_actors.engines.ranks.model_folder import write_shared
from relax_actors.engines.torch.adapter import MARKS, Adapter, run_adapter
from relax_actors.engines.torch.adapter_folder import merged_source
from relax_actors.engines.torch.background import run_in_background
from relax_actors.engines.torch.devices import sharding_of
from relax_actors.engines.torch.forward import Forward
from relax_actors.engines.torch.model import build, build_critic, copy_into, read_folder, save_critic, tensors_of
from relax_actors.engines.torch.optimized_model import AdamW, OptimizedModel
from relax_actors.engines.torch.recompute import recompute_layers
from relax_actors.engines.torch.trained_weights import AllWeights
from relax_actors.media.family import family_of
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import ignore

HEAD = "lm_head."
"""Beginning of the names of a multimodal critic's value head."""


class TorchCritic:
    """One rank, alone or with others that share the value model; implements `CriticEngine` and `RankCritic`.

    The loss of an update is the mean over its tokens. Values are not divided by the sampling temperature.

    Args:
        config: configuration of the run.
        settings: section [critic] of it.
        rank: number of this process.
        store: rendezvous of the ranks; not needed with one rank.

    Raises:
        ConfigError: the model cannot be built.
    """

    def __init__(self, config: Config, settings: CriticSection, rank: int = 0, store: Store | None = None) -> None:
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._config, self._settings, self._path = config, settings, settings.path or config.model_path
        trainer = config.trainer
        # Of the policy: its processor files say how the features of media are normalised.
        precision, family = getattr(torch, trainer.precision), family_of(config.model_path)
        self._sharding = sharding = sharding_of(settings.torch, settings.device, precision, rank, store, precision)
        shares = trainer.share_prefixes
        self._forward = Forward(sharding, precision, 1.0, family, share_prefixes=shares)
        self._multimodal = family is not None
        self._model = self._forward.prepare_critic(sharding.build(self._make, family))
        own = AllWeights(self._model) if config.lora is None else self._with_adapter(config, config.lora)
        self._adapter = own if isinstance(own, Adapter) else None
        if trainer.recompute == "full":
            recompute_layers(self._model)
        self._max_tokens = trainer.max_tokens_per_microbatch
        self._trained = OptimizedModel(self._model, own, AdamW.of_critic(settings, trainer), sharding)
        self._source = sharding.source(own.tensors, torch.float32, self._trained.memory)

    def _make(self, device: torch.device | None) -> PreTrainedModel:
        return build_critic(self._path, seed=self._config.run.seed, device=device)

    def _with_adapter(self, config: Config, section: LoraSection) -> Adapter:
        """Load the base, of the policy or of critic.path, and give it an adapter of its own; the head is trained."""
        own, path = tensors_of(self._model), self._path
        heads = {name: torch.zeros(tensor.shape) for name, tensor in own.items() if self._is_head(name)}
        modules = dict.fromkeys(name.rpartition(".")[0] for name in heads)
        if self._settings.path is not None:
            base = read_folder(self._model, path)
        else:
            policy = read_folder(build(path, device=None), path)
            base = {name: tensor for name, tensor in policy.items() if name in own and name not in heads} | heads
        return run_adapter(config, section, self._model, (path, base), heads=modules, device=self._sharding.device)

    def initialise(self, policy: Sequence[Path] | None) -> None:
        """Initialise the weights and the optimizer; see `CriticEngine`."""
        own = self._trained.weights.tensors()
        if policy is not None:
            heads = {name: torch.zeros(t.shape) for name, t in own.items() if self._is_head(name) and name not in MARKS}
            tensors = {name: tensor for name, tensor in weights.load(policy).items() if name in own} | heads
            self._trained.weights.copy(tensors, "version 0 of the policy")
        elif self._adapter is not None:
            self._adapter.draw(self._config.run.seed)
        else:
            copy_into(self._model, read_folder(self._model, self._path), f"critic.path {self._path}")
        self._trained.reset()

    def _is_head(self, name: str) -> bool:
        """Whether a weight belongs to the value head, which the policy does not have."""
        # The towers of multimodal models lie beside the body.
        return name.startswith(HEAD) if self._multimodal else not name.startswith(f"{self._model.base_model_prefix}.")

    def values(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute the value of the state before each trained token; see `CriticEngine`."""
        forward, model = self._forward, self._model
        return forward.compute(model, lambda batch: forward.values(model, batch), samples, self._max_tokens, progress)

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Accumulate the gradients of the value loss; see `AccumulatesSteps`."""
        forward = self._forward

        def loss_of(plan: MicroBatchPlan) -> tuple[Tensor, dict[str, float]]:
            batch, chosen = forward.micro_batch(samples, plan), [samples[index] for index in plan.indices]
            old, returns = (forward.padded([s.masked(n) for s in chosen], batch.width) for n in ("values", "returns"))
            values = forward.values(self._model, batch)
            loss = value_loss(values, old, returns, clip=self._settings.value_clip)
            return loss.loss.masked_fill(~batch.mask, 0.0).sum(), measure_values(values, returns, loss, batch.mask)

        plans = forward.plan(samples, self._max_tokens)
        self._trained.backward(plans, forward.loss(self._model, loss_of), progress)

    def discard(self) -> None:
        """Discard the accumulated gradients; see `AccumulatesSteps`."""
        self._trained.discard()

    def step(self, step: int, progress: Callable[[], None]) -> StepResult:
        """Update the critic; see `AccumulatesSteps`."""
        if not self._trained.measured:
            msg = f"no rows were accumulated for step {step}; call accumulate first"
            raise ValueError(msg)
        rate = scheduled_learning_rate(self._config, step, self._settings.learning_rate)
        measured = self._trained.update(rate, lambda sums: 1.0 / max(sums["tokens"], 1.0))
        progress()
        return StepResult(value_metrics(measured) | {"learning_rate": rate})

    def fingerprint(self) -> str:
        """Return the fingerprint of the weights."""
        return self._source.visit(ignore, self._sharding.count)

    def release_memory(self, folder: Path | None) -> int:
        """Move weights, gradients and the optimizer's state off the device; see `ReleasesMemory`."""
        return self._trained.memory.release(folder)

    def resume_memory(self) -> int:
        """Move them back; see `ReleasesMemory`."""
        return self._trained.memory.resume()

    def save(self, folder: Path) -> None:
        """Write a checkpoint; see `SavesState`."""
        self._trained.writer("float32", self._trained.state())(folder)

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Write a copy of the state in the background; see `SupportsAsyncSave`."""
        return run_in_background(partial(self._trained.writer("float32", self._trained.state(), unchanging=""), folder))

    def load(self, folder: Path) -> None:
        """Load a checkpoint; see `SavesState`."""
        self._trained.load(folder)

    def export(self, folder: Path) -> None:
        """Write a folder that critic.path can name; see `CriticEngine`."""
        if not self._sharding.is_whole:
            adapter, sharding = self._adapter, self._sharding
            source = self._source if adapter is None else merged_source(adapter, torch.float32, sharding)
            write_shared(folder, self._make, source, "float32")
            return
        with self._trained.memory:
            model = self._model
            if self._adapter is not None:
                model = self._make(None)
                copy_into(model, self._adapter.merged(), "the critic")
            save_critic(model, folder)
