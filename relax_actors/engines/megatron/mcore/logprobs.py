"""Log-probs of a micro-batch's completions from the logits of the ranks that share vocabulary and sequence."""

from __future__ import annotations

from functools import partial
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


def only_scored(model: Any) -> None:
    """Have a stage compute logits of the tokens that `wants` names, and of no others.

    Where tensor ranks share the sequence none has all of these, and the logits are those of all tokens.
    """
    if model.post_process and not model.config.sequence_parallel:
        model.output_layer.register_forward_pre_hook(partial(_cut, model))


def wants(model: Any, scored: Tensor) -> None:
    """Say which tokens of the micro-batch that comes next are scored, `[rows, seq] bool`; the model may be wrapped."""
    while hasattr(model, "module"):
        model = model.module
    model.scored_tokens = scored


def _cut(model: Any, _: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
    """Of `[seq, rows, hidden]` those that are scored, `[scored, 1, hidden]`; one if there is none."""
    hidden = arguments[0].transpose(0, 1)
    cut = hidden[model.scored_tokens]
    return ((cut if len(cut) else hidden[0, :1])[:, None],)


def completion_logprobs(logits: Tensor, part: PartTensors, temperature: float, vocabulary: int) -> Tensor:
    """Log-probs of the completions' tokens, `[sequences, width] float32`, the same on all ranks that share them.

    Args:
        logits: of this rank's positions and piece of the vocabulary, `[rows, length / context, rows / tensor]`, or of
            the tokens that are scored alone, `[1, scored, rows / tensor]`.
        part: the micro-batch.
        temperature: by which logits are divided.
        vocabulary: tokens that there are; pieces of the vocabulary may have rows beyond.
    """
    scored = here(part.scored)
    targets = here(part.targets)[scored]
    known = logits[scored] if logits.shape[:2] == scored.shape else logits[0, : len(targets)]
    chosen = _within(known.float() / temperature, vocabulary)
    found = logits.new_zeros(scored.shape, dtype=torch.float32)
    if len(chosen):
        found = found.masked_scatter(scored, -vocab_parallel_cross_entropy(chosen, targets))
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
    if first + logits.shape[-1] <= vocabulary:
        return logits
    beyond = torch.arange(first, first + logits.shape[-1], device=logits.device) >= vocabulary
    return logits.masked_fill(beyond, float("-inf"))
