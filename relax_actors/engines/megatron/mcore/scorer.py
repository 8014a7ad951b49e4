"""Scoring engine: the Megatron trainer's forward pass with published weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from relax_actors.config.schema import Config
from relax_actors.config.training import MegatronSection
from relax_actors.engines.megatron.architecture import architecture_of
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import process_groups
from relax_actors.engines.megatron.mcore.adapter import MegatronAdapter, run_adapter
from relax_actors.engines.megatron.mcore.micro_batches import MicroBatchTensors
from relax_actors.engines.megatron.mcore.model_chunks import ModelChunks, base_weights, conversion_of, trained_head
from relax_actors.engines.megatron.mcore.rank_weights import RankWeights, local_shards
from relax_actors.engines.megatron.mcore.replay import Replay
from relax_actors.engines.megatron.mcore.schedule import Schedule, Score
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.scoring import Scores
from relax_actors.engines.torch.loss_inputs import ScoredTokens
from relax_actors.engines.torch.swappable_model import SwappableWeights


class MegatronScorer(SwappableWeights):
    """Scoring engine with the whole model in one rank, independent of the trainer's layout.

    Implements `ScoringEngine`, `SupportsSquares` and `TeacherEngine`.

    Args:
        config: configuration of the run.
        device: torch device, or "auto".
        follows: whether further weight versions will be loaded.
    """

    def __init__(self, config: Config, device: str = "auto", *, follows: bool = True) -> None:
        layout, architecture = Layout.of(MegatronSection()), architecture_of(config.model_path)
        process_groups.choose_device(device, "device of the scoring role")
        process_groups.initialise(layout, 0, HashStore())
        super().__init__(process_groups.device(), follows=follows)
        head = trained_head(config)
        self._chunks = ModelChunks(config, architecture, layout, head=head)
        for model in self._chunks.wrapped:
            model.train(mode=False)
        self._replay = None
        if config.trainer.router_replay:
            self._replay = Replay(self._chunks.bare, recomputed=False, sequence_parallel=False)
        conversion = conversion_of(config.model_path, architecture, layout, head)
        self._weights: MegatronAdapter | RankWeights
        if config.lora is None:
            self._weights = RankWeights(local_shards(self._chunks.bare), conversion)
        else:
            base = config.model_path, base_weights(config, config.run.seed)
            self._weights = run_adapter(config, config.lora, self._chunks, conversion, base)
        for model in self._chunks.wrapped:
            model.requires_grad_(False)
        self._schedule = Schedule(config, architecture, layout, has_logits=head is None)
        self._reads_labels = head is not None and config.algorithm.rows != "pairs"

    def _parameters(self) -> Mapping[str, Tensor]:
        return self._weights.parameters

    def _resident(self) -> Iterable[Tensor]:
        return [parameter for model in self._chunks.bare for parameter in model.parameters()]

    def _fitted(self, version: int, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        if isinstance(self._weights, RankWeights):
            return self._weights.shards(tensors)
        return self._weights.fitted(tensors, f"version {version}")

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Log-probs of each sequence; for a reward model scores, or log-probs of labels; see `ScoringEngine`."""
        score = self._schedule.labels if self._reads_labels else self._schedule.scores()
        return self._computed(score, samples, progress)

    def squares(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> list[NDArray[Any]]:
        """Sums of squared probabilities of each sequence; see `SupportsSquares`."""
        return self._computed(self._schedule.squares, samples, progress)

    @torch.no_grad()
    def score_top(self, samples: Sequence[TrainSample], top_k: int, progress: Callable[[], None]) -> list[Scores]:
        """Log-probs of each sequence and of the most likely tokens; see `TeacherEngine`."""
        self.require_weights()
        batches, ids = self._schedule.micro_batches(samples), list[Tensor]()
        found: dict[int, Scores] = {}

        def keep(number: int, _: MicroBatchTensors, scored: ScoredTokens) -> tuple[Tensor, dict[str, float]]:
            top, chosen = scored.top, ids.pop()
            for row, index in enumerate(batches[number].indices):
                sample, own = samples[index], slice(0, samples[index].trained)
                logprobs = np.zeros(len(sample), np.float32)
                logprobs[sample.loss_mask] = scored.logprobs[row, own].cpu().numpy()
                likely = np.zeros((sample.trained, 0), np.float32) if top is None else top[row, own].cpu().numpy()
                found[index] = Scores(logprobs, chosen[row, own].int().cpu().numpy(), likely)
            return scored.logprobs.sum(), {}

        if self._replay is not None:
            self._replay.begin(replays=True, trains=False)
        score, models, replay = self._schedule.top_scores(top_k, ids.append), self._chunks.wrapped, self._replay
        self._schedule.run(models, batches, samples, keep, progress, score=score, forward_only=True, replay=replay)
        return [found[index] for index in range(len(samples))]

    def _computed(
        self, score: Score, samples: Sequence[TrainSample], progress: Callable[[], None]
    ) -> list[NDArray[Any]]:
        """Compute a number for each trained token, 0 for others."""
        self.require_weights()
        batches = self._schedule.micro_batches(samples)
        if self._replay is not None:
            self._replay.begin(replays=True, trains=False)
        found: list[NDArray[Any]] = [np.zeros(len(sample), np.float32) for sample in samples]
        models, replay = self._chunks.wrapped, self._replay
        scored = self._schedule.score(models, batches, samples, progress, score=score, replay=replay)
        for number, values in scored.items():
            rows = values.cpu().numpy()
            for row, index in enumerate(batches[number].indices):
                found[index][samples[index].loss_mask] = rows[row, : samples[index].trained]
        return found
