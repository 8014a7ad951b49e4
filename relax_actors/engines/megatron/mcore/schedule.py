"""Forward and backward passes of micro-batches through the pipeline stages of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from relax_actors.config.schema import Config
from relax_actors.engines.megatron.architecture import Architecture
from relax_actors.engines.megatron.layout import Layout
from relax_actors.engines.megatron.mcore import process_groups
from relax_actors.engines.megatron.mcore.attention import PackedParams
from relax_actors.engines.megatron.mcore.logprobs import (
    context_parallel_slice,
    set_scored_tokens,
    trained_logprobs,
    trained_logprobs_and_entropies,
)
from relax_actors.engines.megatron.mcore.micro_batches import MicroBatch, MicroBatchTensors, plan_micro_batches
from relax_actors.engines.megatron.mcore.replay import Replay
from relax_actors.engines.protocols.samples import TrainSample, lengths_of

Scored = tuple[Tensor, Tensor | None]
"""Log-probs of the trained tokens, `[sequences, width]`, and their entropies if asked for."""
LossFunction = Callable[[int, MicroBatchTensors, Scored], tuple[Tensor, dict[str, float]]]
"""Maps the number, tensors and scores of a micro-batch to its loss and metrics."""


class Schedule:
    """Runs micro-batches through a model.

    Methods are collective: all ranks of a group must call them in the same order.

    Args:
        config: configuration of the run.
        architecture: of the model.
        layout: of the ranks.
    """

    def __init__(self, config: Config, architecture: Architecture, layout: Layout) -> None:
        self._layout, self._vocab_size = layout, architecture.vocab_size
        self._max_tokens, self._temperature = config.trainer.max_tokens_per_microbatch, config.rollout.temperature
        self._device = process_groups.device()

    def micro_batches(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        """Micro-batches of this rank.

        Raises:
            ValueError: a sequence is empty, or longer than the token budget.
        """
        plans = plan_micro_batches(lengths_of(samples), self._layout, self._max_tokens)
        return plans[parallel_state.get_data_parallel_rank()]

    def run(
        self,
        models: Sequence[Any],
        batches: list[MicroBatch],
        samples: Sequence[TrainSample],
        loss_function: LossFunction,
        progress: Callable[[], None],
        *,
        temperature: float | None = None,
        forward_only: bool = False,
        entropies: bool = False,
        replay: Replay | None = None,
    ) -> list[dict[str, float]]:
        """Run the forward and backward passes of micro-batches.

        Args:
            models: model chunks of this rank.
            batches: micro-batches of this rank.
            samples: sequences of the step, indexed by the micro-batches.
            loss_function: called on the ranks of the last pipeline stage.
            progress: called before each micro-batch.
            temperature: divisor of the logits; default is the run's sampling temperature.
            forward_only: skip the backward pass.
            entropies: compute the entropies of the trained tokens.
            replay: router replay of the models, after `Replay.begin`.

        Returns:
            Metrics of each micro-batch on the ranks of the last pipeline stage; empty on the others.
        """
        measured: list[dict[str, float]] = []
        divisor = self._temperature if temperature is None else temperature

        def loss(number: int, tensors: MicroBatchTensors, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
            scored: Scored
            if entropies:
                scored = trained_logprobs_and_entropies(logits, tensors, divisor, self._vocab_size)
            else:
                scored = trained_logprobs(logits, tensors, divisor, self._vocab_size), None
            value, metrics = loss_function(number, tensors, scored)
            measured.append(metrics)
            # The number of tokens is unused: the optimizer step divides by that of the whole step.
            return value, torch.zeros((), dtype=torch.int, device=self._device), {}

        def forward(numbers: Iterator[int], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(numbers)
            progress()
            tensors = MicroBatchTensors.of(batches[number], samples, self._device)
            if replay is not None:
                chunk = next(i for i, candidate in enumerate(models) if candidate is model)
                replay.set(chunk, None if tensors.experts is None else context_parallel_slice(tensors.experts))
            set_scored_tokens(model, context_parallel_slice(tensors.scored))
            output = model(
                input_ids=context_parallel_slice(tensors.tokens),
                position_ids=None,
                attention_mask=None,
                packed_seq_params=None if tensors.packing is None else PackedParams(tensors.packing),
            )
            return output, partial(loss, number, tensors)

        numbers = [iter(range(len(batches))) for _ in models]
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

    @torch.no_grad()
    def score(
        self,
        models: Sequence[Any],
        batches: list[MicroBatch],
        samples: Sequence[TrainSample],
        progress: Callable[[], None],
        replay: Replay | None = None,
    ) -> dict[int, Tensor]:
        """Log-probs `[sequences, width]` by micro-batch number, on the last pipeline stage."""
        scored: dict[int, Tensor] = {}

        def keep(number: int, _: MicroBatchTensors, found: Scored) -> tuple[Tensor, dict[str, float]]:
            scored[number] = found[0]
            return found[0].sum(), {}

        self.run(models, batches, samples, keep, progress, forward_only=True, replay=replay)
        return scored
