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


def limit_logits_to_scored(model: Any) -> None:
    """Compute logits only of the tokens that `set_scored_tokens` selects.

    With sequence parallelism no rank holds all of these tokens, so the last stage computes the logits of all tokens.
    """
    if model.post_process and not model.config.sequence_parallel:
        model.output_layer.register_forward_pre_hook(partial(_select_scored, model))


def set_scored_tokens(model: Any, scored: Tensor) -> None:
    """Select tokens of the next micro-batch, `[rows, seq] bool`; `model` may be wrapped."""
    while hasattr(model, "module"):
        model = model.module
    model.scored_tokens = scored


def _select_scored(model: Any, _: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
    """Scored tokens of `[seq, rows, hidden]` as `[scored, 1, hidden]`, at least one."""
    hidden = arguments[0].transpose(0, 1)
    selected = hidden[model.scored_tokens]
    return ((selected if len(selected) else hidden[0, :1])[:, None],)


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
        logits: of this rank's positions and shard of the vocabulary, `[rows, length / context, vocab / tensor]`, or of
            the scored tokens alone, `[1, scored, vocab / tensor]`.
        batch: the micro-batch.
        temperature: divisor of the logits.
        vocab_size: number of tokens; shards of the vocabulary may have padding rows after it.
        entropies: whether to compute entropies over the vocabulary.
        ids: `[sequences, width, k] int64`, tokens whose log-probs are needed at the place of each trained token.
    """
    scored, selected, targets = _scored(logits, batch)
    shards = TensorParallelShards(selected.shape[-1], vocab_size)
    logprobs = of_vocabulary = top = None
    if len(selected) and entropies:
        logprobs, of_vocabulary = logprobs_and_entropies(selected, targets, temperature, shards)
    elif len(selected):
        logprobs = -vocab_parallel_cross_entropy(_mask_padding(selected.float() / temperature, vocab_size), targets)
    if len(selected) and ids is not None:
        top = logprobs_at(selected, _of_scored(ids, batch), temperature, shards)
    # A context-parallel rank without scored tokens takes part in the sums of those that have some.
    in_sequences = partial(_in_sequences, scored=scored, logits=logits, batch=batch)
    return ScoredTokens(
        in_sequences(logprobs),
        in_sequences(of_vocabulary) if entropies else None,
        None if ids is None else in_sequences(top, inner=ids.shape[-1:]),
    )


def trained_squares(logits: Tensor, batch: MicroBatchTensors, temperature: float, vocab_size: int) -> Tensor:
    """Compute the sum of squared probabilities at the trained tokens, without gradient; see `score_trained`."""
    scored, selected, _ = _scored(logits, batch)
    shards = TensorParallelShards(selected.shape[-1], vocab_size)
    found = squared_probabilities(selected, temperature, shards) if len(selected) else None
    return _in_sequences(found, scored, logits, batch)


def trained_values(values: Tensor, batch: MicroBatchTensors) -> Tensor:
    """Return the values before the trained tokens, `[sequences, width] float32`.

    Args:
        values: of this rank's positions, `[rows, length / context, 1]`.
        batch: the micro-batch.
    """
    scored = context_parallel_slice(batch.scored)
    selected = values[scored][:, 0].float()
    return _in_sequences(selected if len(selected) else None, scored, values, batch)


def top_tokens(logits: Tensor, batch: MicroBatchTensors, k: int) -> Tensor:
    """Return the most likely tokens at each trained token, `[sequences, width, k] int64`; the model is on one rank."""
    scored, selected, _ = _scored(logits, batch)
    laid_out = batch.tokens.new_zeros((scored.numel(), k))
    laid_out[scored.flatten()] = selected.topk(k, -1).indices
    return laid_out[batch.positions]


def _scored(logits: Tensor, batch: MicroBatchTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Mask of the scored tokens at this rank's positions, their logits, and their targets."""
    scored = context_parallel_slice(batch.scored)
    targets = context_parallel_slice(batch.targets)[scored]
    return scored, logits[scored] if logits.shape[:2] == scored.shape else logits[0, : len(targets)], targets


def _of_scored(values: Tensor, batch: MicroBatchTensors) -> Tensor:
    """Take values `[sequences, width, k]` of the trained tokens to this rank's scored tokens, `[scored, k]`."""
    laid_out = values.new_zeros((batch.tokens.numel(), values.shape[-1]))
    laid_out[batch.positions[batch.mask]] = values[batch.mask]
    own = context_parallel_slice(laid_out.view(*batch.tokens.shape, -1))
    return own[context_parallel_slice(batch.scored)]


def _in_sequences(
    values: Tensor | None, scored: Tensor, logits: Tensor, batch: MicroBatchTensors, inner: Sequence[int] = ()
) -> Tensor:
    """Lay out values of this rank's scored tokens as `[sequences, width]`, with those of all context-parallel ranks.

    Without scored tokens `values` is None. `inner` is the shape of the values of one token.
    """
    found = logits.new_zeros((*scored.shape, *inner), dtype=torch.float32)
    if values is None:
        # Without values the gradient is 0, but backward must reach the collectives of the model. Barred ids have logits
        # of -inf, which 0.0 times the sum would turn into NaN.
        found = found + logits[..., :0].float().sum()
    else:
        found = found.masked_scatter(scored.view(*scored.shape, *(1 for _ in inner)), values)
    if parallel_state.get_context_parallel_world_size() > 1:
        whole = found.new_zeros((*batch.tokens.shape, *inner))
        whole = whole.index_copy(1, _positions(whole.shape[1], whole.device), found)
        found = _ContextParallelSum.apply(whole, parallel_state.get_context_parallel_group())  # type: ignore[no-untyped-call]
    return found.flatten(0, 1)[batch.positions]


def _mask_padding(logits: Tensor, vocab_size: int) -> Tensor:
    """Set the logits of vocabulary padding in this rank's shard to -inf."""
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    if first + logits.shape[-1] <= vocab_size:
        return logits
    padding = torch.arange(first, first + logits.shape[-1], device=logits.device) >= vocab_size
    return logits.masked_fill(padding, float("-inf"))
