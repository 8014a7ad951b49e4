"""Log-probs of trained tokens from logits split over tensor- and context-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor, distributed

from relax_actors.algorithms.entropy import Shards, logprobs_and_entropies, logprobs_at, squared_probabilities
from relax_actors.engines.megatron.mcore import process_groups
from relax_actors.engines.megatron.mcore.attention import chunk_positions
from relax_actors.engines.megatron.mcore.micro_batches import MicroBatchTensors
from relax_actors.engines.torch.barred import BarredIds
from relax_actors.engines.torch.objective import ScoredTokens
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
    """Find the tokens before trained tokens that this context-parallel rank holds.

    Returns:
        `[own] int64`, which trained tokens these are, None for all of them; and `[own] int64`, the index of the token
        before each in this rank's `rows * length / context`.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return None, batch.scored
    length = batch.tokens.shape[1]
    held = _positions(length, batch.tokens.device)
    place = held.new_full((length,), -1).index_copy(0, held, torch.arange(len(held), device=held.device))
    column = place[batch.scored % length]
    own = torch.nonzero(column >= 0)[:, 0]
    return own, (batch.scored // length)[own] * len(held) + column[own]


def limit_logits_to_scored(model: Any) -> None:
    """Compute logits only of the tokens that `set_scored_tokens` selects.

    With sequence parallelism no rank holds all of these tokens, so the last stage computes the logits of all tokens.
    """
    if model.post_process and not model.config.sequence_parallel:
        model.output_layer.register_forward_pre_hook(partial(_select_scored, model))


def set_scored_tokens(model: Any, scored: Tensor) -> None:
    """Select tokens of the next micro-batch, `[scored] int64`, index in `rows * seq`; `model` may be wrapped."""
    while hasattr(model, "module"):
        model = model.module
    model.scored_tokens = scored


def _select_scored(model: Any, _: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
    """Scored tokens of `[seq, rows, hidden]` as `[scored, 1, hidden]`, at least one."""
    hidden = arguments[0].transpose(0, 1).flatten(0, 1)
    selected = hidden.index_select(0, model.scored_tokens)
    return ((selected if len(selected) else hidden[:1])[:, None],)


def select_outputs(outputs: Tensor, batch: MicroBatchTensors, *, limited: bool) -> Tensor:
    """Return the model's outputs at the scored tokens of this rank, `[own, n]`.

    Args:
        outputs: `[rows, length / context, n]`, or `[1, own, n]` of the scored tokens alone.
        batch: the micro-batch.
        limited: whether these are outputs of the scored tokens alone, see `limit_logits_to_scored`.
    """
    scored = scored_tokens(batch)[1]
    return outputs[0, : len(scored)] if limited else outputs.flatten(0, 1).index_select(0, scored)


def barred_ids(family: Family | None, padded_vocab_size: int) -> BarredIds:
    """Barred ids of a family in this rank's shard of the vocabulary; see `engines.torch.barred`."""
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    width = padded_vocab_size // ranks
    return BarredIds(family, process_groups.device(), range(rank * width, (rank + 1) * width))


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
    logits: Tensor,
    batch: MicroBatchTensors,
    temperature: float,
    vocab_size: int,
    *,
    entropies: bool = False,
    ids: Tensor | None = None,
) -> ScoredTokens:
    """Compute log-probs of the trained tokens, and what else the loss needs.

    All ranks that share the sequences get the same values.

    Args:
        logits: of this rank's scored tokens and shard of the vocabulary, `[own, vocab / tensor]`.
        batch: the micro-batch.
        temperature: divisor of the logits.
        vocab_size: number of tokens; shards of the vocabulary may have padding rows after it.
        entropies: whether to compute entropies over the vocabulary.
        ids: `[sequences, width, k] int64`, tokens whose log-probs are needed at the place of each trained token.
    """
    own = scored_tokens(batch)[0]
    targets = batch.targets if own is None else batch.targets[own]
    shards = TensorParallelShards(logits.shape[-1], vocab_size)
    logprobs = of_vocabulary = top = None
    if len(logits) and entropies:
        logprobs, of_vocabulary = logprobs_and_entropies(logits, targets, temperature, shards)
    elif len(logits):
        logprobs = -vocab_parallel_cross_entropy(_mask_padding(logits.float() / temperature, vocab_size), targets)
    if len(logits) and ids is not None:
        of_trained = ids[batch.mask]
        top = logprobs_at(logits, of_trained if own is None else of_trained[own], temperature, shards)
    # A context-parallel rank without scored tokens takes part in the sums of those that have some.
    in_sequences = partial(_in_sequences, logits=logits, batch=batch)
    return ScoredTokens(
        in_sequences(logprobs),
        in_sequences(of_vocabulary) if entropies else None,
        None if ids is None else in_sequences(top, inner=ids.shape[-1:]),
    )


def trained_squares(logits: Tensor, batch: MicroBatchTensors, temperature: float, vocab_size: int) -> Tensor:
    """Compute the sum of squared probabilities at the trained tokens, without gradient; see `score_trained`."""
    shards = TensorParallelShards(logits.shape[-1], vocab_size)
    return _in_sequences(squared_probabilities(logits, temperature, shards) if len(logits) else None, logits, batch)


def trained_values(values: Tensor, batch: MicroBatchTensors) -> Tensor:
    """Return the values before the trained tokens, `[sequences, width] float32`.

    Args:
        values: of this rank's scored tokens, `[own, 1]`.
        batch: the micro-batch.
    """
    return _in_sequences(values[:, 0].float() if len(values) else None, values, batch)


def top_tokens(logits: Tensor, batch: MicroBatchTensors, k: int) -> Tensor:
    """Return the most likely tokens at each trained token, `[sequences, width, k] int64`; the model is on one rank."""
    found = batch.tokens.new_zeros((*batch.mask.shape, k))
    found[batch.mask] = logits.topk(k, -1).indices
    return found


def _in_sequences(values: Tensor | None, logits: Tensor, batch: MicroBatchTensors, inner: Sequence[int] = ()) -> Tensor:
    """Lay out values of this rank's scored tokens as `[sequences, width]`, with those of all context-parallel ranks.

    Without scored tokens `values` is None. `inner` is the shape of the values of one token.
    """
    own, _ = scored_tokens(batch)
    if values is None:
        # Without values the gradient is 0, but backward must reach the collectives of the model. Barred ids have logits
        # of -inf, which 0.0 times the sum would turn into NaN.
        values = logits.new_zeros((0, *inner), dtype=torch.float32) + logits[..., :0].float().sum()
    if own is not None:
        whole = values.new_zeros((len(batch.scored), *inner)).index_copy(0, own, values)
        values = _ContextParallelSum.apply(whole, parallel_state.get_context_parallel_group())  # type: ignore[no-untyped-call]
    places = torch.nonzero(batch.mask.flatten())[:, 0]
    found = values.new_zeros((batch.mask.numel(), *inner)).index_copy(0, places, values)
    return found.view(*batch.mask.shape, *inner)


def _mask_padding(logits: Tensor, vocab_size: int) -> Tensor:
    """Set the logits of vocabulary padding in this rank's shard to -inf."""
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    if first + logits.shape[-1] <= vocab_size:
        return logits
    padding = torch.arange(first, first + logits.shape[-1], device=logits.device) >= vocab_size
    return logits.masked_fill(padding, float("-inf"))
