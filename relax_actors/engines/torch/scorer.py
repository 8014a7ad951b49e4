"""Scoring engines: the forward pass of the torch trainer with published weights, or with those of a teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.class_scores import class_logprobs
from relax_actors.config import Config
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.scoring import Scores
from relax_actors.engines.torch.adapter import run_weights
from relax_actors.engines.torch.devices import device_of
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.forward import Forward
from relax_actors.engines.torch.micro_batch import MicroBatch
from relax_actors.engines.torch.score_model import model_maker
from relax_actors.engines.torch.swappable_model import SwappableModel
from relax_actors.engines.torch.trained_weights import AllWeights
from relax_actors.media.family import family_of

MICRO_BATCH = 4096
"""Tokens of a micro-batch of a `FrozenScorer`, if no prompt is longer."""


class TorchScorer(SwappableModel):
    """Scores with the same forward pass as `TorchEngine`, so log-probs agree with the trainer's up to rounding.

    With trainer.precision = "bfloat16" weights are published in bfloat16, so embeddings and norms, which the trainer
    keeps in float32, are rounded here. Implements `ScoringEngine` and `SupportsSquares`.

    Args:
        config: configuration of the run.
        device: torch device, or "auto".
        follows: whether further weight versions will be loaded.
        path: model folder; None for the folder of the run's model.

    Raises:
        ConfigError: the model cannot be built, or has no supported router for trainer.router_replay.
    """

    def __init__(self, config: Config, device: str = "auto", *, follows: bool = True, path: Path | None = None) -> None:
        dtype = getattr(torch, config.trainer.precision)
        folder = path or config.model_path
        self._scores = config.algorithm.trains_scores and path is None
        make = model_maker(config) if self._scores else None
        own = partial(run_weights, config) if path is None else AllWeights
        super().__init__(folder, device_of(device), follows=follows, make=make, weights=own)
        temperature, shares = config.rollout.temperature, config.trainer.share_prefixes
        family, head_dtype = family_of(folder), getattr(torch, config.head_precision)
        self._forward = Forward(
            self._device, dtype, temperature, family, share_prefixes=shares, head_dtype=head_dtype, scores=self._scores
        )
        self._forward.prepare(self._model)
        self._are_pairs = config.algorithm.rows == "pairs"
        self._max_tokens = config.trainer.max_tokens_per_microbatch
        self._routers = Routers(self._model) if config.trainer.router_replay and path is None else None

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute log-probs of each sequence, or scores of a reward model; see `ScoringEngine`."""
        self.require_weights()
        if self._scores:
            return self._of_targets(samples, progress)
        return self._forward.score(self._model, samples, self._max_tokens, progress, self._routers)

    def _of_targets(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute the scores of answers of pairs, and the log-probs of the labels of other answers and of steps."""

        def compute(batch: MicroBatch) -> Tensor:
            return self._forward.scores(self._model, batch)

        logprobs = self._forward.compute(self._model, compute, samples, self._max_tokens, progress)
        if self._are_pairs:
            return [scores[:, 0] for scores in logprobs]
        return [self._of_labels(sample, scores) for sample, scores in zip(samples, logprobs, strict=True)]

    @staticmethod
    def _of_labels(sample: TrainSample, scores: NDArray[Any]) -> NDArray[Any]:
        logprobs, labels = class_logprobs(torch.from_numpy(scores)), torch.from_numpy(sample.masked("targets"))
        scored = np.zeros(len(sample), np.float32)
        scored[sample.loss_mask] = logprobs[sample.loss_mask].gather(-1, labels.long().unsqueeze(-1))[:, 0].numpy()
        return scored

    def squares(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Compute sums of squared probabilities of each sequence; see `SupportsSquares`."""
        self.require_weights()

        def compute(batch: MicroBatch) -> Tensor:
            return self._forward.squares(self._model, batch, routers=self._routers)

        return self._forward.compute(self._model, compute, samples, self._max_tokens, progress)

    def score_top(self, samples: Sequence[TrainSample], top_k: int, progress: Callable[[], None]) -> list[Scores]:
        """Compute log-probs of each sequence and of the most likely tokens; see `TeacherEngine`."""
        self.require_weights()
        return self._forward.score_top(self._model, samples, self._max_tokens, top_k, progress)


class TorchTeacher(TorchScorer):
    """A frozen model; implements `TeacherEngine`. Raises ConfigError for a folder without a fitting model."""

    def __init__(self, config: Config, path: Path, device: str = "auto") -> None:
        super().__init__(config, device, follows=False, path=path)
        self.freeze(path)


class FrozenScorer(SwappableModel):
    """Scores continuations of prompts with a frozen model of a folder, at temperature 1.

    Args:
        config: configuration of the run; `trainer.precision` is that of the computation.
        path: model folder with weights.
        device: torch device, or "auto".

    Raises:
        ConfigError: the folder holds no model that transformers can build, or no weights that fit it.
    """

    def __init__(self, config: Config, path: Path, device: str = "auto") -> None:
        super().__init__(path, device_of(device), follows=False)
        self.freeze(path)
        dtype, head_dtype = getattr(torch, config.trainer.precision), getattr(torch, config.head_precision)
        self._forward = Forward(self._device, dtype, 1.0, family_of(path), head_dtype=head_dtype)
        self._forward.prepare(self._model)

    def logprobs(
        self,
        prompts: Sequence[NDArray[Any]],
        continuations: Sequence[NDArray[Any]],
        progress: Callable[[], None],
    ) -> NDArray[Any]:
        """Return the log-prob of each continuation of each prompt, `[prompts, continuations] float64`.

        A prompt is read once. The same prompts in one call give the same bits in any process. A micro-batch has at most
        `MICRO_BATCH` tokens, or those of the longest prompt with a continuation.

        Args:
            prompts: `[prompt_len] int32` each.
            continuations: `[len] int32` each, at least one token.
            progress: called after every micro-batch.
        """
        samples = [
            TrainSample.of_completion(prompt, tokens, row=row, sample=sample)
            for row, prompt in enumerate(prompts)
            for sample, tokens in enumerate(continuations)
        ]
        most = max(MICRO_BATCH, max((len(sample.token_ids) for sample in samples), default=0))
        scored = self._forward.score(self._model, samples, most, progress, None)
        totals = np.array([one.sum(dtype=np.float64) for one in scored])
        return totals.reshape(len(prompts), len(continuations))
