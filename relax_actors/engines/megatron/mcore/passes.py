"""Micro-batches on their way through the stages of this rank, to train or to score."""

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
from relax_actors.engines.megatron.mcore import process
from relax_actors.engines.megatron.mcore.attention import Packed
from relax_actors.engines.megatron.mcore.logprobs import completion_logprobs, here, wants
from relax_actors.engines.megatron.mcore.parts import Part, PartTensors, parts_of
from relax_actors.engines.megatron.mcore.replay import Replay
from relax_actors.engines.protocols.sequences import Sequences

LossOf = Callable[[int, PartTensors, Tensor], tuple[Tensor, dict[str, float]]]
"""Of a micro-batch's number, its tensors and log-probs: the loss, and what was measured."""


class Passes:
    """How this rank passes micro-batches; all ranks of a group call the same methods alike.

    Args:
        config: the run's.
        architecture: of the model.
        layout: of the ranks.
    """

    def __init__(self, config: Config, architecture: Architecture, layout: Layout) -> None:
        self._layout, self._vocabulary = layout, architecture.vocabulary
        self._budget, self._temperature = config.trainer.max_tokens_per_microbatch, config.rollout.temperature
        self._device = process.device()

    def parts(self, sequences: Sequences) -> list[Part]:
        """The micro-batches of this rank.

        Raises:
            ValueError: a sequence is empty, or longer than the budget.
        """
        shares = parts_of(sequences.lengths, self._layout, self._budget)
        return shares[parallel_state.get_data_parallel_rank()]

    def run(
        self,
        models: Sequence[Any],
        parts: list[Part],
        sequences: Sequences,
        loss_of: LossOf,
        progress: Callable[[], None],
        *,
        temperature: float | None = None,
        forward_only: bool = False,
        replay: Replay | None = None,
    ) -> list[dict[str, float]]:
        """Pass micro-batches through the pipeline, and back; what each measured, on the ranks of the last stage.

        Args:
            models: the stages of this rank.
            parts: the micro-batches.
            sequences: that they are of.
            loss_of: called on the ranks of the last stage.
            progress: called at each.
            temperature: by which logits are divided, if it is not the run's.
            forward_only: whether there is no way back.
            replay: that has begun, of the models' routers.
        """
        measured: list[dict[str, float]] = []
        wanted = self._temperature if temperature is None else temperature

        def loss(number: int, tensors: PartTensors, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
            logprobs = completion_logprobs(logits, tensors, wanted, self._vocabulary)
            value, figures = loss_of(number, tensors, logprobs)
            measured.append(figures)
            return value, torch.zeros((), dtype=torch.int, device=self._device), {}

        def forward(numbers: Iterator[int], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(numbers)
            progress()
            tensors = PartTensors.of(parts[number], sequences, self._device)
            if replay is not None:
                stage = next(i for i, one in enumerate(models) if one is model)
                replay.set(stage, None if tensors.experts is None else here(tensors.experts))
            wants(model, here(tensors.scored))
            output = model(
                input_ids=here(tensors.tokens),
                position_ids=None,
                attention_mask=None,
                packed_seq_params=None if tensors.packing is None else Packed(tensors.packing),
            )
            return output, partial(loss, number, tensors)

        numbers = [iter(range(len(parts))) for _ in models]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=numbers if len(models) > 1 else numbers[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=len(parts),
            seq_length=parts[0].length,
            micro_batch_size=parts[0].rows,
            forward_only=forward_only,
        )
        return measured

    @torch.no_grad()
    def score(
        self,
        models: Sequence[Any],
        parts: list[Part],
        sequences: Sequences,
        progress: Callable[[], None],
        replay: Replay | None = None,
    ) -> dict[int, tuple[PartTensors, Tensor]]:
        """Micro-batches with the log-probs of their completions, by number, on the ranks of the last stage."""
        found: dict[int, tuple[PartTensors, Tensor]] = {}

        def keep(number: int, part: PartTensors, logprobs: Tensor) -> tuple[Tensor, dict[str, float]]:
            found[number] = part, logprobs
            return logprobs.sum(), {}

        self.run(models, parts, sequences, keep, progress, forward_only=True, replay=replay)
        return found
