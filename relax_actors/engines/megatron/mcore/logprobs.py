"""Log-probs of a micro-batch's completions from the logits of the ranks that share vocabulary and sequence."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor, distributed

from relax_actors.engines.megatron.mcore.attention import chunk_positions
from relax_actors.engines.megatron.mcore.parts import PartTensors


class _Added(torch.autograd.Function):
    """The sum over the ranks of a group, each of which goes on with its own part of the gradient."""

    @staticmethod
    def forward(_: Any, tensor: Tensor, group: Any) -> Tensor:
        whole = tensor.clone()
        distributed.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def here(tensor: Tensor) -> Tensor:
    """Of `[rows, length]` what this rank of context parallelism has."""
    ranks = parallel_state.get_context_parallel_world_size()
    return tensor if ranks == 1 else tensor[:, _positions(tensor.shape[1], tensor.device)]


def _positions(length: int, device: torch.device) -> Tensor:
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return chunk_positions(length, ranks, rank, device)


def completion_logprobs(logits: Tensor, part: PartTensors, temperature: float, vocabulary: int) -> Tensor:
    """Log-probs of the completions' tokens, `[sequences, width] float32`, the same on all ranks that share them.

    Args:
        logits: of this rank's positions and piece of the vocabulary, `[rows, length / context, rows / tensor]`.
        part: the micro-batch.
        temperature: by which logits are divided.
        vocabulary: tokens that there are; pieces of the vocabulary may have rows beyond.
    """
    scored, targets = here(part.scored), here(part.targets)
    chosen = _within(logits[scored].float() / temperature, vocabulary)
    found = logits.new_zeros(scored.shape, dtype=torch.float32)
    if len(chosen):
        found = found.masked_scatter(scored, -vocab_parallel_cross_entropy(chosen, targets[scored]))
    else:  # nothing but padding; its gradient is 0, but backward must go through
        found = found + 0.0 * logits.float().sum()
    if parallel_state.get_context_parallel_world_size() > 1:
        whole = found.new_zeros(part.tokens.shape)
        whole = whole.index_copy(1, _positions(whole.shape[1], whole.device), found)
        found = _Added.apply(whole, parallel_state.get_context_parallel_group())  # type: ignore[no-untyped-call]
    return found.flatten()[part.places]


def _within(logits: Tensor, vocabulary: int) -> Tensor:
    """Without a chance for the rows of this rank's piece that are beyond the vocabulary."""
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    beyond = torch.arange(first, first + logits.shape[-1], device=logits.device) >= vocabulary
    return logits.masked_fill(beyond, float("-inf")) if beyond.any() else logits
