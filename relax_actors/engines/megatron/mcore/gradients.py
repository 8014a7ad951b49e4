"""Norms of the gradients that micro-batches have accumulated, over all ranks of a model."""

from __future__ import annotations

from collections import defaultdict

import torch

from relax_actors.engines.megatron.mcore.optimizer import Optimizer
from relax_actors.engines.megatron.mcore.rank_weights import RankWeights
from relax_actors.engines.protocols.training import gradient_norms
from relax_actors.engines.ranks.collectives import all_gather_messages
from relax_actors.engines.torch.sharding import square


class Gradients:
    """Gradients of a model in training.

    Args:
        optimizer: optimizer of the model.
        weights: weights of the model on this rank.
    """

    def __init__(self, optimizer: Optimizer, weights: RankWeights) -> None:
        self._optimizer, self._weights = optimizer, weights

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """Return the norms of what has been accumulated, by the names of `MeasuresGradients`; collective.

        Tensors have their names in megatron-core. The gradients are summed over ranks as for an optimizer step, and
        restored afterwards, so that a step is not changed by its measurement.
        """
        optimizer = self._optimizer
        kept = [(buffer, buffer.clone()) for buffer in optimizer.buffers()]
        optimizer.sum_gradients()
        optimizer.inner.prepare_grads()
        own: dict[str, float] = defaultdict(float)
        for slot in optimizer.slots():
            key = self._weights.key_of(slot.parameter)
            counts = self._weights.is_first_copy(key) if slot.is_shared_out else self._weights.keeps(key)
            if counts and slot.main.grad is not None:
                own[key] += square(slot.main.grad)
        for slot in optimizer.slots():  # a backward pass would add to these views of the buffers
            slot.parameter.grad = slot.main.grad = None
        for buffer, content in kept:
            buffer.copy_(content)
        squares: dict[str, float] = defaultdict(float)
        for message in all_gather_messages(dict(own)):
            for key, value in message.items():
                squares[key] += value
        return gradient_norms(squares, optimizer.loss_scale.value)
