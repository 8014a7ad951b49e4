"""Scoring in this process with torch: the forward pass of the trainer's engine, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from relax_actors.config import Config
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.forward import Forward, device_of
from relax_actors.engines.torch.hosted_model import ServedModel


class TorchScorer(ServedModel):
    """The trainer's forward pass with published weights, so that its numbers are the trainer's to rounding.

    With trainer.precision = "bfloat16" weights are published in bfloat16. Embeddings and norms, which the trainer keeps
    in float32, are then rounded here.

    Args:
        config: the run's.
        device: torch device, or "auto".
        follows: whether further versions are to come.
    """

    def __init__(self, config: Config, device: str = "auto", *, follows: bool = True) -> None:
        super().__init__(config.model_path, device_of(device), follows=follows)
        dtype = getattr(torch, config.trainer.precision)
        self._forward = Forward(self._device, dtype, config.rollout.temperature)
        self._forward.prepare(self._model)
        self._token_budget = config.trainer.max_tokens_per_microbatch
        self._routers = Routers(self._model) if config.trainer.router_replay else None

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute log-probs of each sequence; see the protocol."""
        self.require_weights()
        return self._forward.score(self._model, samples, self._token_budget, progress, self._routers)
