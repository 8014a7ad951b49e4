"""Critic with torch in this process: the policy's architecture with a value head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.schedules import scheduled_learning_rate
from relax_actors.algorithms.values import measure_values, value_loss, value_metrics
from relax_actors.config.schema import Config
from relax_actors.config.training import CriticSection
from relax_actors.engines.protocols.samples import MicroBatchPlan, TrainSample
from relax_actors.engines.protocols.training import StepResult
from relax_actors.engines.torch.forward import Forward, device_of
from relax_actors.engines.torch.host_memory import move_to_device, move_to_host
from relax_actors.engines.torch.model import build_critic, copy_into, read_folder, save_critic, tensors_of
from relax_actors.engines.torch.optimized_model import AdamW, OptimizedModel, begin_write_state, write_state
from relax_actors.engines.torch.recompute import recompute_layers
from relax_actors.media.family import family_of
from relax_actors.weights import files as weights

HEAD = "lm_head."
"""Beginning of the names of a multimodal critic's value head."""


class TorchCritic:
    """Trains a value model in one process on one device; implements `CriticEngine`.

    The loss of an update is the mean over its tokens. Values are not divided by the sampling temperature.

    Args:
        config: configuration of the run.
        settings: section [critic] of it.

    Raises:
        ConfigError: the model cannot be built.
    """

    def __init__(self, config: Config, settings: CriticSection) -> None:
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._config, self._settings, self._path = config, settings, settings.path or config.model_path
        device, trainer = device_of(settings.device), config.trainer
        # Of the policy: its processor files say how the features of media are normalised.
        precision, family = getattr(torch, trainer.precision), family_of(config.model_path)
        self._forward = Forward(device, precision, 1.0, family, share_prefixes=trainer.share_prefixes)
        self._multimodal = family is not None
        self._model = self._forward.prepare_critic(build_critic(self._path, seed=config.run.seed, device=device))
        if trainer.recompute == "full":
            recompute_layers(self._model)
        self._max_tokens = trainer.max_tokens_per_microbatch
        self._trained = OptimizedModel(self._model, AdamW.of_critic(settings, trainer))

    def initialise(self, policy: Sequence[Path] | None) -> None:
        """Initialise the weights and the optimizer; see `CriticEngine`."""
        own = tensors_of(self._model)
        if policy is None:
            tensors = read_folder(self._model, self._path)
            source = f"critic.path {self._path}"
        else:
            heads = {name: torch.zeros_like(tensor) for name, tensor in own.items() if self._is_head(name)}
            tensors = {name: tensor for name, tensor in weights.load(policy).items() if name in own} | heads
            source = "version 0 of the policy"
        copy_into(self._model, tensors, source)
        self._trained.reset()

    def _is_head(self, name: str) -> bool:
        """Whether a weight belongs to the value head, which the policy does not have."""
        # The towers of multimodal models lie beside the body.
        return name.startswith(HEAD) if self._multimodal else not name.startswith(f"{self._model.base_model_prefix}.")

    def values(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute the value of the state before each trained token; see `CriticEngine`."""
        forward, model = self._forward, self._model
        return forward.compute(lambda batch: forward.values(model, batch), samples, self._max_tokens, progress)

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Accumulate the gradients of the value loss; see `AccumulatesSteps`."""
        forward = self._forward

        def loss_of(plan: MicroBatchPlan) -> tuple[Tensor, dict[str, float]]:
            batch, chosen = forward.micro_batch(samples, plan), [samples[index] for index in plan.indices]
            old, returns = (forward.padded([s.masked(n) for s in chosen], batch.width) for n in ("values", "returns"))
            values = forward.values(self._model, batch)
            loss = value_loss(values, old, returns, clip=self._settings.value_clip)
            return loss.loss.masked_fill(~batch.mask, 0.0).sum(), measure_values(values, returns, loss, batch.mask)

        self._trained.backward(forward.plan(samples, self._max_tokens), loss_of, progress)

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
        with self._trained.moving:
            return weights.fingerprint(tensors_of(self._model).items())

    def release_memory(self) -> int:
        """Move weights, gradients and the optimizer's state to host memory; see `ReleasesMemory`."""
        with self._trained.moving:
            return move_to_host(self._trained.tensors())

    def resume_memory(self) -> int:
        """Move them back; see `ReleasesMemory`."""
        with self._trained.moving:
            return move_to_device(self._trained.tensors(), self._forward.device)

    def save(self, folder: Path) -> None:
        """Write a checkpoint; see `SavesState`."""
        write_state("float32", folder, self._trained.state())

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Write a copy of the state in the background; see `SupportsAsyncSave`."""
        return begin_write_state("float32", folder, self._trained.state())

    def load(self, folder: Path) -> None:
        """Load a checkpoint; see `SavesState`."""
        self._trained.load(folder)

    def export(self, folder: Path) -> None:
        """Write a folder that critic.path can name; see `CriticEngine`."""
        with self._trained.moving:
            save_critic(self._model, folder)
