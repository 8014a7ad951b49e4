"""Log-probs of trained tokens from hidden states and shards of the vocabulary, with tensor- and context-parallel ranks.

The output layer of a model returns its input, and logits are computed chunk by chunk of trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, distributed

from relax_actors.algorithms.vocabulary import Head, Shards, score_tokens, score_top, squared_probabilities
from relax_actors.engines.megatron.mcore import process_groups
from relax_actors.engines.megatron.mcore.attention import chunk_positions
from relax_actors.engines.megatron.mcore.micro_batches import MicroBatchTensors
from relax_actors.engines.torch.barred import BarredIds
from relax_actors.engines.torch.loss_inputs import ScoredTokens
from relax_actors.media.family import Family


class _ContextParallelSum(torch.autograd.Function):
    """Sum over ranks whose gradient is the identity: each rank trains through its own summand."""

    @staticmethod
    def forward(_: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def context_parallel_slice(tensor: Tensor) -> Tensor:
    """Columns of `[rows, length, ...]` that this context-parallel rank holds."""
    ranks = parallel_state.get_context_parallel_world_size()
    return tensor if ranks == 1 else tensor[:, _positions(tensor.shape[1], tensor.device)]


def _positions(length: int, device: torch.device) -> Tensor:
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return chunk_positions(length, ranks, rank, device)


def scored_tokens(batch: MicroBatchTensors) -> tuple[Tensor | None, Tensor]:
    """Find the places that this context-parallel rank holds where the model is read for trained tokens.

    Returns:
        `[own] int64`, which trained tokens these are, None for all of them; and `[own] int64`, the index of the place
        of each in this rank's `rows * length / context`.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return None, batch.scored
    length = batch.tokens.shape[1]
    held = _positions(length, batch.tokens.device)
    place = held.new_full((length,), -1).index_copy(0, held, torch.arange(len(held), device=held.device))
    column = place[batch.scored % length]
    own = torch.nonzero(column >= 0)[:, 0]
    return own, (batch.scored // length)[own] * len(held) + column[own]


def return_hidden_states(model: Any) -> None:
    """Make the output layer of a model return its input, `[seq, rows, hidden]` of the whole sequence."""
    if model.post_process:
        model.output_layer.forward = partial(_hidden_states, shares_sequence=model.config.sequence_parallel)


def _hidden_states(hidden: Tensor, *_: Any, shares_sequence: bool, **__: Any) -> tuple[Tensor, None]:
    # In backward each rank has the gradient through its shard of the vocabulary; these are summed.
    if shares_sequence:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True), None
    return copy_to_tensor_model_parallel_region(hidden), None


def bare(model: Any) -> Any:
    """Return the GPTModel of a model chunk that may be wrapped."""
    while hasattr(model, "module"):
        model = model.module
    return model


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the last pipeline stage computes at the scored tokens of this rank.

    Attributes:
        hidden: `[own, hidden]`, or the numbers `[own, outputs]` of a `NumberHead`.
        head: this rank's shard of the output head; None with a `NumberHead`.
        shards: reductions over the ranks that share the vocabulary.
    """

    hidden: Tensor
    head: Head | None
    shards: Shards

    def nothing(self) -> Tensor:
        """Return 0, with a gradient of 0: backward must reach the collectives of the model."""
        read = [self.hidden] if self.head is None else [self.hidden, self.head.weight]
        return torch.stack([tensor[:0].float().sum() for tensor in read]).sum()


class OutputHeads:
    """Selects scored tokens and finds the output heads of models.

    Args:
        family: family of the models; None if they read text only.
        vocab_size: number of tokens; shards of the vocabulary may have padding rows after it.
        padded_vocab_size: number of rows of all shards.
        has_logits: whether the models have an output layer; otherwise they have a `NumberHead`.
        dtype: dtype of the computation of logits.
    """

    def __init__(
        self, family: Family | None, vocab_size: int, padded_vocab_size: int, dtype: torch.dtype, *, has_logits: bool
    ) -> None:
        width = padded_vocab_size // parallel_state.get_tensor_model_parallel_world_size()
        self._shards, self._has_logits, self._dtype = TensorParallelShards(width, vocab_size), has_logits, dtype
        own = range(self._shards.first, self._shards.first + width)
        self._barred = BarredIds(family, process_groups.device(), own)

    def outputs(self, model: Any, output: Tensor, batch: MicroBatchTensors) -> Outputs:
        """Select what a model of the last stage, which may be wrapped, returned: `[rows, length / context, n]`."""
        model = bare(model)
        selected = output.flatten(0, 1).index_select(0, scored_tokens(batch)[1])
        if not self._has_logits:
            return Outputs(selected, None, self._shards)
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        return Outputs(selected, Head(weight, barred=self._barred.ids, dtype=self._dtype), self._shards)


class TensorParallelShards(Shards):
    """Reductions over the tensor-parallel ranks, which share the vocabulary.

    Args:
        columns: logits of this rank's shard, padding included.
        vocab_size: number of tokens; shards may have padding rows after it.
    """

    def __init__(self, columns: int, vocab_size: int) -> None:
        self.first = parallel_state.get_tensor_model_parallel_rank() * columns
        own = min(max(vocab_size - self.first, 0), columns)
        self.width = own if own < columns else None
        self._group = parallel_state.get_tensor_model_parallel_group()

    def max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over the ranks."""
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX, group=self._group)
        return tensor

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        distributed.all_reduce(tensor, group=self._group)
        return tensor


def score_trained(
    outputs: Outputs,
    batch: MicroBatchTensors,
    temperature: float,
    *,
    entropies: bool = False,
    ids: Tensor | None = None,
) -> ScoredTokens:
    """Compute log-probs of the trained tokens, and what else the loss needs.

    All ranks that share the sequences get the same values.

    Args:
        outputs: of this rank.
        batch: the micro-batch.
        temperature: divisor of the logits.
        entropies: whether to compute entropies over the vocabulary.
        ids: `[sequences, width, k] int64`, tokens whose log-probs are needed at the place of each trained token.
    """
    own, tokens = scored_tokens(batch)[0], batch.targets[:, None]
    if ids is not None:
        tokens = torch.cat([tokens, ids[batch.mask]], -1)
    tokens = tokens if own is None else tokens[own]
    logprobs = of_vocabulary = None
    if len(outputs.hidden):
        scores = score_tokens(
            outputs.hidden, tokens, temperature, head=outputs.head, shards=outputs.shards, entropies=entropies
        )
        logprobs, of_vocabulary = scores.logprobs, scores.entropies
    # A context-parallel rank without scored tokens takes part in the sums of those that have some.
    of_tokens = _in_sequences(logprobs, outputs, batch, tokens.shape[1:])
    return ScoredTokens(
        of_tokens[..., 0],
        _in_sequences(of_vocabulary, outputs, batch) if entropies else None,
        None if ids is None else of_tokens[..., 1:],
    )


def score_most_likely(
    outputs: Outputs, batch: MicroBatchTensors, temperature: float, k: int
) -> tuple[Tensor, ScoredTokens]:
    """Find the most likely tokens at each trained token, and compute their log-probs; the model is on one rank.

    Returns:
        `[sequences, width, k] int64` ids, and the log-probs of the trained and of these tokens.
    """
    logprobs, ids, top = score_top(outputs.hidden, batch.targets, k, temperature, head=outputs.head)
    laid_out = batch.tokens.new_zeros((*batch.mask.shape, k))
    laid_out[batch.mask] = ids
    of_tokens = _in_sequences(torch.cat([logprobs[:, None], top], -1), outputs, batch, (1 + k,))
    return laid_out, ScoredTokens(of_tokens[..., 0], None, of_tokens[..., 1:])


def trained_squares(outputs: Outputs, batch: MicroBatchTensors, temperature: float) -> Tensor:
    """Compute the sum of squared probabilities at the trained tokens, without gradient; see `score_trained`."""
    squares = None
    if len(outputs.hidden):
        squares = squared_probabilities(outputs.hidden, temperature, head=outputs.head, shards=outputs.shards)
    return _in_sequences(squares, outputs, batch)


def trained_numbers(outputs: Outputs, batch: MicroBatchTensors) -> Tensor:
    """Return the numbers of a `NumberHead` at the trained tokens, `[sequences, width, outputs] float32`."""
    numbers = outputs.hidden.float() if len(outputs.hidden) else None
    return _in_sequences(numbers, outputs, batch, outputs.hidden.shape[1:])


def _in_sequences(
    values: Tensor | None, outputs: Outputs, batch: MicroBatchTensors, inner: Sequence[int] = ()
) -> Tensor:
    """Lay out values of this rank's scored tokens as `[sequences, width]`, with those of all context-parallel ranks.

    Without scored tokens `values` is None. `inner` is the shape of the values of one token.
    """
    own, _ = scored_tokens(batch)
    if values is None:
        nothing = outputs.nothing()
        values = nothing.new_zeros((0, *inner)) + nothing
    if own is not None:
        whole = values.new_zeros((len(batch.scored), *inner)).index_copy(0, own, values)
        values = _ContextParallelSum.apply(whole, parallel_state.get_context_parallel_group())  # type: ignore[no-untyped-call]
    places = torch.nonzero(batch.mask.flatten())[:, 0]
    laid_out = values.new_zeros((batch.mask.numel(), *inner)).index_copy(0, places, values)
    return laid_out.view(*batch.mask.shape, *inner)
