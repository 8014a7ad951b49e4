"""Scoring engine: the forward pass of the torch trainer with published weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.config import Config
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.forward import Forward, MicroBatch, device_of
from relax_actors.engines.torch.swappable_model import SwappableModel


class TorchScorer(SwappableModel):
    """Scores with the same forward pass as `TorchEngine`, so log-probs agree with the trainer's up to rounding.

    With trainer.precision = "bfloat16" weights are published in bfloat16, so embeddings and norms, which the trainer
    keeps in float32, are rounded here. Implements `ScoringEngine` and `SupportsSquares`.

    Args:
        config: configuration of the run.
        device: torch device, or "auto".
        follows: whether further weight versions will be loaded.

    Raises:
        ConfigError: the model cannot be built, or has no supported router for trainer.router_replay.
    """

    def __init__(self, config: Config, device: str = "auto", *, follows: bool = True) -> None:
        super().__init__(config.model_path, device_of(device), follows=follows)
        dtype = getattr(torch, config.trainer.precision)
        self._forward = Forward(self._device, dtype, config.rollout.temperature)
        self._forward.prepare(self._model)
        self._max_tokens = config.trainer.max_tokens_per_microbatch
        self._routers = Routers(self._model) if config.trainer.router_replay else None

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute log-probs of each sequence; see `ScoringEngine`."""
        self.require_weights()
        return self._forward.score(self._model, samples, self._max_tokens, progress, self._routers)

    def squares(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute sums of squared probabilities of each sequence; see `SupportsSquares`."""
        self.require_weights()

        def compute(batch: MicroBatch) -> Tensor:
            return self._forward.squares(self._model, batch, routers=self._routers)

        return self._forward.compute(compute, samples, self._max_tokens, progress)
