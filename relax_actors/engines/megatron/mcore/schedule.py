"""Forward and backward passes of micro-batches through the pipeline stages of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.class_scores import class_logprobs
from relax_actors.config.schema import Config
from relax_actors.engines.megatron.families import Architecture
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import process_groups
from relax_actors.engines.megatron.mcore.attention import BatchParams
from relax_actors.engines.megatron.mcore.logprobs import (
    OutputHeads,
    Outputs,
    bare,
    context_parallel_slice,
    score_most_likely,
    score_trained,
    trained_numbers,
    trained_squares,
)
from relax_actors.engines.megatron.mcore.micro_batches import MicroBatch, MicroBatchTensors, plan_micro_batches
from relax_actors.engines.megatron.mcore.model_chunks import padded_vocabulary
from relax_actors.engines.megatron.mcore.replay import Replay
from relax_actors.engines.megatron.mcore.shared_towers import Ahead, SharedTowers
from relax_actors.engines.protocols.media import media_of
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.ranks.collectives import all_gather_messages
from relax_actors.engines.ranks.shares import rows_are_whole
from relax_actors.engines.torch.loss_inputs import ScoredTokens
from relax_actors.media.family import family_of

Score = Callable[[Outputs, MicroBatchTensors, Sequence[TrainSample]], ScoredTokens]
"""Maps outputs at scored tokens, tensors and sequences of a micro-batch to what losses read; see `Schedule.scores`."""
LossFunction = Callable[[int, MicroBatchTensors, ScoredTokens], tuple[Tensor, dict[str, float]]]
"""Maps the number, tensors and scores of a micro-batch to its loss and metrics."""


class Schedule:
    """Runs micro-batches through a model.

    Methods are collective: all ranks of a group must call them in the same order.

    Args:
        config: configuration of the run.
        architecture: of the model.
        layout: of the ranks.
        has_logits: whether the models have an output layer; otherwise they have a `NumberHead`.
    """

    def __init__(self, config: Config, architecture: Architecture, layout: Layout, *, has_logits: bool = True) -> None:
        self._layout = layout
        self._max_tokens, self._temperature = config.trainer.max_tokens_per_microbatch, config.rollout.temperature
        self._share_prefixes, self._keeps_rows = config.trainer.share_prefixes, config.algorithm.compares_answers
        self._device = process_groups.device()
        self._family = family_of(config.model_path)
        padded = padded_vocabulary(architecture, layout)
        dtype = getattr(torch, config.head_precision)
        self._has_logits = has_logits
        self._heads = OutputHeads(self._family, architecture.vocab_size, padded, dtype, has_logits=has_logits)

    def micro_batches(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        """Micro-batches of this rank.

        Raises:
            ValueError: a sequence is empty, or longer than the token budget.
        """
        return self._plans(samples)[parallel_state.get_data_parallel_rank()]

    def keeps_rows(self, samples: Sequence[TrainSample]) -> bool:
        """Whether all sequences of each row are in one micro-batch of one rank."""
        return rows_are_whole(samples, [batch.indices for plan in self._plans(samples) for batch in plan])

    def _plans(self, samples: Sequence[TrainSample]) -> list[list[MicroBatch]]:
        """Return the micro-batches of each data-parallel rank."""
        return plan_micro_batches(
            samples,
            self._layout,
            self._max_tokens,
            share_prefixes=self._share_prefixes,
            keeps_rows=self._keeps_rows,
        )

    def scores(
        self, *, temperature: float | None = None, entropies: bool = False, top: bool = False, squares: bool = False
    ) -> Score:
        """Return how to score the trained tokens; a reward model has its scores there, whatever else is asked for.

        Args:
            temperature: divisor of the logits; default is the run's sampling temperature.
            entropies: compute the entropies over the vocabulary.
            top: compute log-probs of the teacher's most likely tokens, where sequences have any.
            squares: compute the sums of squared probabilities.
        """
        if not self._has_logits:
            return self.numbers
        divisor = self._temperature if temperature is None else temperature

        def score(outputs: Outputs, tensors: MicroBatchTensors, samples: Sequence[TrainSample]) -> ScoredTokens:
            ids = None
            if top and samples and samples[0].teacher_top_ids is not None:
                ids = tensors.padded([sample.masked("teacher_top_ids") for sample in samples])
            scored = score_trained(outputs, tensors, divisor, entropies=entropies, ids=ids)
            return replace(scored, squares=trained_squares(outputs, tensors, divisor)) if squares else scored

        return score

    def top_scores(self, k: int, keep: Callable[[Tensor], None]) -> Score:
        """Return how to score trained tokens and the most likely tokens at each, whose ids `keep` receives.

        The model must be on one rank.
        """

        def score(outputs: Outputs, tensors: MicroBatchTensors, _: Sequence[TrainSample]) -> ScoredTokens:
            ids, scored = score_most_likely(outputs, tensors, self._temperature, k)
            keep(ids)
            return scored

        return score

    @staticmethod
    def numbers(outputs: Outputs, tensors: MicroBatchTensors, _: Sequence[TrainSample]) -> ScoredTokens:
        """Take the values of a critic or the first scores of a reward model in place of log-probs; a `Score`."""
        numbers = trained_numbers(outputs, tensors)
        return ScoredTokens(numbers[..., 0], scores=numbers)

    @staticmethod
    def labels(outputs: Outputs, tensors: MicroBatchTensors, samples: Sequence[TrainSample]) -> ScoredTokens:
        """Compute the log-probs of labels by the scores of a reward model in place of log-probs; a `Score`."""
        logprobs = class_logprobs(trained_numbers(outputs, tensors))
        labels = tensors.padded([sample.masked("targets") for sample in samples])
        return ScoredTokens(logprobs.gather(-1, labels.long()[..., None])[..., 0])

    def squares(self, outputs: Outputs, tensors: MicroBatchTensors, _: Sequence[TrainSample]) -> ScoredTokens:
        """Compute sums of squared probabilities in place of log-probs; a `Score`."""
        return ScoredTokens(trained_squares(outputs, tensors, self._temperature))

    def run(
        self,
        models: Sequence[Any],
        batches: list[MicroBatch],
        samples: Sequence[TrainSample],
        loss_function: LossFunction,
        progress: Callable[[], None],
        *,
        score: Score | None = None,
        forward_only: bool = False,
        replay: Replay | None = None,
    ) -> list[dict[str, float]]:
        """Run the forward and backward passes of micro-batches.

        Args:
            models: model chunks of this rank.
            batches: micro-batches of this rank.
            samples: sequences of the step, indexed by the micro-batches.
            loss_function: called on the ranks of the last pipeline stage.
            progress: called before each micro-batch.
            score: scores the trained tokens; None for their log-probs.
            forward_only: skip the backward pass.
            replay: router replay of the models, after `Replay.begin`.

        Returns:
            Metrics of each micro-batch on the ranks of the last pipeline stage; empty on the others.
        """
        measured: list[dict[str, float]] = []
        score = score or self.scores()

        def loss(
            number: int, tensors: MicroBatchTensors, model: Any, output: Tensor
        ) -> tuple[Tensor, Tensor, dict[str, float]]:
            outputs = self._heads.outputs(model, output, tensors)
            scored = score(outputs, tensors, [samples[index] for index in batches[number].indices])
            value, metrics = loss_function(number, tensors, scored)
            measured.append(metrics)
            # The number of tokens is unused: the optimizer step divides by that of the whole step.
            return value, torch.zeros((), dtype=torch.int, device=self._device), {}

        def forward(numbers: Iterator[int], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(numbers)
            progress()
            tensors = MicroBatchTensors.of(batches[number], samples, self._device, self._family)
            if replay is not None:
                _set_experts(replay, models, model, tensors)
            return _outputs(model, tensors, ahead), partial(loss, number, tensors, model)

        numbers = [iter(range(len(batches))) for _ in models]
        with self._encoded_ahead(models[0], batches, samples, progress, trains=not forward_only) as ahead:
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=numbers if len(models) > 1 else numbers[0],
                model=models if len(models) > 1 else models[0],
                num_microbatches=len(batches),
                seq_length=batches[0].length,
                micro_batch_size=batches[0].rows,
                forward_only=forward_only,
            )
        return measured

    @contextmanager
    def _encoded_ahead(
        self,
        model: Any,
        batches: Sequence[MicroBatch],
        samples: Sequence[TrainSample],
        progress: Callable[[], None],
        *,
        trains: bool,
    ) -> Iterator[Ahead | None]:
        """Encode the media of all micro-batches, where stages share the towers; see `SharedTowers.ahead`."""
        towers: SharedTowers | None = getattr(bare(model), "shared", None)
        if towers is None:
            yield None
            return
        media = media_of(samples[index].media for batch in batches for index in batch.indices)
        with towers.ahead(media, self._max_tokens, progress, trains=trains) as ahead:
            yield ahead

    @torch.no_grad()
    def score(
        self,
        models: Sequence[Any],
        batches: list[MicroBatch],
        samples: Sequence[TrainSample],
        progress: Callable[[], None],
        *,
        score: Score | None = None,
        replay: Replay | None = None,
    ) -> dict[int, Tensor]:
        """Log-probs `[sequences, width]` by micro-batch number, on the last pipeline stage; arguments as of `run`."""
        scored: dict[int, Tensor] = {}

        def keep(number: int, _: MicroBatchTensors, scores: ScoredTokens) -> tuple[Tensor, dict[str, float]]:
            scored[number] = scores.logprobs
            return scores.logprobs.sum(), {}

        self.run(models, batches, samples, keep, progress, score=score, forward_only=True, replay=replay)
        return scored

    def score_everywhere(
        self,
        models: Sequence[Any],
        samples: Sequence[TrainSample],
        progress: Callable[[], None],
        *,
        score: Score | None = None,
        replay: Replay | None = None,
    ) -> list[NDArray[Any]]:
        """Log-probs of each sequence, `[len] float32`, the same on all ranks; arguments as of `run`."""
        batches = self.micro_batches(samples)
        scored = self.score(models, batches, samples, progress, score=score, replay=replay)
        own = [
            (index, row[: samples[index].trained])
            for number, values in scored.items()
            for index, row in zip(batches[number].indices, values.cpu().numpy(), strict=False)
        ]
        logprobs: list[NDArray[Any]] = [np.zeros(len(sample), np.float32) for sample in samples]
        for part in all_gather_messages(own if process_groups.reports_metrics() else []):
            for index, values in part:
                logprobs[index][samples[index].loss_mask] = values
        return logprobs


def _set_experts(replay: Replay, models: Sequence[Any], model: Any, tensors: MicroBatchTensors) -> None:
    """Have a model chunk route the tokens of a micro-batch to the recorded experts, if it has any."""
    chunk = next(i for i, candidate in enumerate(models) if candidate is model)
    replay.set(chunk, None if tensors.experts is None else context_parallel_slice(tensors.experts))


def _outputs(model: Any, tensors: MicroBatchTensors, ahead: Ahead | None) -> Tensor:
    """Run the forward pass of a model chunk on a micro-batch."""
    has_layout = tensors.packing is not None or tensors.media is not None
    output: Tensor = model(
        input_ids=context_parallel_slice(tensors.tokens),
        position_ids=None,
        attention_mask=None,
        packed_seq_params=BatchParams(tensors.packing, tensors.media, ahead) if has_layout else None,
    )
    return output
