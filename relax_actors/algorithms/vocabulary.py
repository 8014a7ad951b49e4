"""Log-probs, entropies and squared probabilities over the vocabulary, in chunks.

Invariant: with an output head no tensor of `[tokens, vocab]` exists. Logits have the size of a chunk; the backward pass
computes them again. From given logits, intermediate results have the size of a chunk, and the gradient is the only
other tensor of the logits' size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_ELEMENTS = 1 << 26
"""Logits of a chunk: 256 MiB in float32, 440 tokens with a vocabulary of 152k: enough to keep a GPU's matmul busy."""


class Shards:
    """Reductions over ranks that share the vocabulary; here in one place.

    Attributes:
        first: id of the first token of this rank's shard.
        width: tokens of this rank's shard, without padding after them; None if there is no padding.
    """

    first = 0
    width: int | None = None

    def max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over the ranks."""
        return tensor

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return tensor


@dataclass(frozen=True, slots=True)
class Head:
    """Output head of a language model: `logits = cap(scale (hidden weight^T + bias))`.

    Attributes:
        weight: `[vocab, hidden]`.
        bias: `[vocab]`.
        scale: factor of the logits.
        softcap: bound of the logits, `softcap tanh(logits / softcap)`; None without one.
        barred: `[ids] int64`, tokens that are never sampled; their logits are -inf.
        dtype: dtype of the matrix products; None for that of the weight.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    barred: Tensor | None = None
    dtype: torch.dtype | None = None

    def cast(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in the dtype of the matrix products."""
        dtype = self.dtype or self.weight.dtype
        return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a model says of tokens.

    Attributes:
        logprobs: `[..., k]`, natural log-probs of the tokens.
        entropies: `[...]`, entropies of the distributions in nats, if they were asked for.
    """

    logprobs: Tensor
    entropies: Tensor | None


@dataclass(frozen=True, slots=True)
class _Distribution:
    """The distribution over the vocabulary from hidden states, or from logits."""

    head: Head | None
    temperature: float
    shards: Shards
    dtype: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor, temperature: float, head: Head | None, shards: Shards | None) -> _Distribution:
        if not temperature > 0:
            msg = f"temperature is {temperature}; score greedy samples at the training temperature, such as 1.0"
            raise ValueError(msg)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        return cls(head, temperature, shards or Shards(), dtype)

    def chunks(self, hidden: Tensor) -> list[slice]:
        width = hidden.shape[-1] if self.head is None else len(self.head.weight)
        size = max(1, CHUNK_ELEMENTS // width)
        return [slice(start, start + size) for start in range(0, len(hidden), size)]

    def scaled(self, logits: Tensor) -> Tensor:
        """Return `log(p) + constant`, -inf at barred tokens and padding."""
        head, scaled = self.head, logits.to(self.dtype)
        if head is not None and head.scale != 1.0:
            scaled = scaled * head.scale
        if head is not None and head.softcap is not None:
            scaled = (scaled / head.softcap).tanh_().mul_(head.softcap)
        scaled = scaled / self.temperature
        if head is not None and head.barred is not None:
            scaled.index_fill_(-1, head.barred, float("-inf"))
        if self.shards.width is not None:
            scaled[:, self.shards.width :] = float("-inf")
        return scaled

    def of_logits(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient of `logits` from that of `scaled(logits)`, which is overwritten."""
        head, gradient = self.head, gradient.div_(self.temperature)
        if head is not None and head.barred is not None:
            gradient.index_fill_(-1, head.barred, 0.0)
        if head is not None and head.softcap is not None:
            capped = (logits.to(self.dtype) * (head.scale / head.softcap)).tanh_()
            gradient.mul_(capped.square_().neg_().add_(1.0))
        if head is not None and head.scale != 1.0:
            gradient.mul_(head.scale)
        return gradient.to(logits.dtype)

    def parts(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the result of `scaled` chunk by chunk."""
        cast = None if self.head is None else self.head.cast()
        for part in self.chunks(hidden):
            yield part, self.scaled(_logits(hidden[part], cast))


def _logits(hidden: Tensor, head: tuple[Tensor, Tensor | None] | None) -> Tensor:
    return hidden if head is None else functional.linear(hidden.to(head[0].dtype), *head)


class _TokenScores(torch.autograd.Function):
    """Log-probs at `ids`, and entropies if needed; several chunks are recomputed."""

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        _weight: Tensor | None,
        _bias: Tensor | None,
        ids: Tensor,
        distribution: _Distribution,
        entropies: bool,  # noqa: FBT001 autograd passes arguments by position
    ) -> tuple[Tensor, Tensor | None]:
        rows, shards = len(hidden), distribution.shards
        logprobs = torch.empty(ids.shape, dtype=distribution.dtype, device=hidden.device)
        normalisers = torch.empty(rows, dtype=distribution.dtype, device=hidden.device)
        of_vocabulary = torch.empty_like(normalisers) if entropies else None
        cast = None if distribution.head is None else distribution.head.cast()
        chunks, kept = distribution.chunks(hidden), None
        for part in chunks:
            logits = _logits(hidden[part], cast)
            scaled = distribution.scaled(logits)
            exponentials, normaliser, total = _normalised(scaled, shards)
            logprobs[part] = shards.sum(_chosen(scaled, ids[part], shards.first)) - normaliser[:, None]
            normalisers[part] = normaliser
            if of_vocabulary is not None:
                # Probabilities that underflow contribute 0, also where a logit is -inf.
                weighted = scaled.masked_fill_(exponentials == 0, 0.0).mul_(exponentials)
                of_vocabulary[part] = normaliser - shards.sum(weighted.sum(-1)) / total
            kept = logits if cast is not None and len(chunks) == 1 else None
        context.save_for_backward(hidden, ids, normalisers, of_vocabulary, kept)
        context.distribution = distribution
        return logprobs, of_vocabulary

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, ids, normalisers, entropies, kept = context.saved_tensors
        distribution: _Distribution = context.distribution
        cast = None if distribution.head is None else distribution.head.cast()
        of_hidden, totals = torch.empty_like(hidden), _HeadGradients(context.needs_input_grad[1:3])
        for part in distribution.chunks(hidden):
            logits = _logits(hidden[part], cast) if kept is None else kept
            logp = distribution.scaled(logits).sub_(normalisers[part, None])
            of_logprobs = gradients[0][part]
            if entropies is None:
                gradient = logp.exp_().mul_(-of_logprobs.sum(-1, keepdim=True))
            else:
                # d logprob[k] / d z = [ids[k]] - p, and d entropy / d z = -p (log p + entropy).
                probability = logp.exp()
                gradient = logp.masked_fill_(probability == 0, 0.0).add_(entropies[part, None])
                gradient.mul_(-gradients[1][part, None]).sub_(of_logprobs.sum(-1, keepdim=True)).mul_(probability)
            inside, local = _local(ids[part], distribution.shards.first, logits.shape[-1])
            gradient.scatter_add_(-1, local, of_logprobs * inside)
            of_logits = distribution.of_logits(gradient, logits)
            of_hidden[part] = of_logits if cast is None else of_logits @ cast[0]
            totals.add(of_logits, hidden[part])
        return of_hidden, *totals.finished(distribution.head), None, None, None


class _HeadGradients:
    """Sums of the gradients of a head's weight and bias over chunks, in float32 at least."""

    def __init__(self, needed: tuple[bool, bool]) -> None:
        self._needed = needed
        self._sums: list[Tensor | None] = [None, None]

    def add(self, of_logits: Tensor, hidden: Tensor) -> None:
        if self._needed[0]:
            left, right = of_logits.t(), hidden.to(of_logits.dtype)
            if (total := self._sums[0]) is None:
                self._sums[0] = _wide(left @ right)
            elif total.dtype == left.dtype:
                total.addmm_(left, right)
            else:
                total.add_(left @ right)
        if self._needed[1]:
            own = of_logits.sum(0, dtype=_wide(of_logits[:0]).dtype)
            self._sums[1] = own if self._sums[1] is None else self._sums[1].add_(own)

    def finished(self, head: Head | None) -> tuple[Tensor | None, Tensor | None]:
        if head is None:
            return None, None
        weight, bias = (
            None if not needed or of is None else torch.zeros_like(of) if total is None else total.to(of.dtype)
            for needed, total, of in zip(self._needed, self._sums, (head.weight, head.bias), strict=True)
        )
        return weight, bias


def score_tokens(
    hidden: Tensor,
    ids: Tensor,
    temperature: float,
    *,
    head: Head | None = None,
    shards: Shards | None = None,
    entropies: bool = False,
) -> TokenScores:
    """Compute tokens' log-probs and, if needed, entropies, with gradients.

    The distribution is `softmax(logits / temperature)` over the full vocabulary; top-p and top-k are not applied. Half
    precision is computed in float32, chunk by chunk.

    Args:
        hidden: `[..., hidden]`, hidden states; without a head the logits `[..., vocab]`, of this rank's shard of the
            vocabulary if `shards` is given.
        ids: `[..., k] int64`, valid token ids.
        temperature: divisor of the logits.
        head: output head of the model; None if `hidden` are logits.
        shards: reductions over the ranks that share the vocabulary; None if it is in one place.
        entropies: whether to compute entropies, `H = logsumexp(z) - sum(softmax(z) z)` with z = logits / temperature.

    Returns:
        Results in float32 (float64 for float64 hidden states).

    Raises:
        ValueError: the temperature is not positive.
    """
    distribution = _Distribution.of(hidden, temperature, head, shards)
    weight, bias = (None, None) if head is None else (head.weight, head.bias)
    apply: Callable[..., tuple[Tensor, Tensor | None]] = _TokenScores.apply
    logprobs, of_vocabulary = apply(hidden.flatten(0, -2), weight, bias, ids.flatten(0, -2), distribution, entropies)
    return TokenScores(
        logprobs.view(ids.shape), None if of_vocabulary is None else of_vocabulary.view(hidden.shape[:-1])
    )


@torch.no_grad()
def score_top(
    hidden: Tensor, targets: Tensor, k: int, temperature: float, *, head: Head | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute tokens' log-probs and the most likely tokens, without gradient.

    Args:
        hidden: `[tokens, hidden]`, hidden states; without a head the logits.
        targets: `[tokens] int64`, valid token ids.
        k: number of the most likely tokens.
        temperature: divisor of the logits.
        head: output head of the model; None if `hidden` are logits.

    Returns:
        `[tokens]` log-probs of the targets; `[tokens, k] int64` ids, and `[tokens, k]` their log-probs.
    """
    distribution = _Distribution.of(hidden, temperature, head, None)
    logprobs = torch.empty((len(hidden), 1 + k), dtype=distribution.dtype, device=hidden.device)
    ids = targets.new_empty((len(hidden), k))
    for part, scaled in distribution.parts(hidden):
        ids[part] = scaled.topk(k, -1).indices
        chosen = scaled.gather(-1, torch.cat([targets[part, None], ids[part]], -1))
        logprobs[part] = chosen - _normalised(scaled, distribution.shards)[1][:, None]
    return logprobs[:, 0], ids, logprobs[:, 1:]


@torch.no_grad()
def squared_probabilities(
    hidden: Tensor, temperature: float, *, head: Head | None = None, shards: Shards | None = None
) -> Tensor:
    """Compute the sum of the squared probabilities over the vocabulary, `sum(softmax(logits / temperature)^2)`.

    Without gradient. For the optimal token baseline (arXiv 2602.07078). Arguments as of `score_tokens`.

    Returns:
        `[...] float32` (float64 for float64 hidden states).
    """
    distribution = _Distribution.of(hidden, temperature, head, shards)
    flat = hidden.flatten(0, -2)
    squares = torch.empty(len(flat), dtype=distribution.dtype, device=hidden.device)
    for part, scaled in distribution.parts(flat):
        exponentials, _, total = _normalised(scaled, distribution.shards)
        squares[part] = distribution.shards.sum(exponentials.square_().sum(-1)) / total.square()
    return squares.view(hidden.shape[:-1])


def _normalised(scaled: Tensor, shards: Shards) -> tuple[Tensor, Tensor, Tensor]:
    """Return `exp(scaled - maximum)`, `[rows, vocab]`, its sum and logsumexp, `[rows]`."""
    peak = shards.max(scaled.max(-1).values)
    exponentials = (scaled - peak[:, None]).exp_()
    total = shards.sum(exponentials.sum(-1))
    return exponentials, peak + total.log(), total


def _local(ids: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return which tokens this shard holds, and their index in it (0 for others)."""
    local = ids - first
    inside = (local >= 0) & (local < width)
    return inside, local.masked_fill(~inside, 0)


def _chosen(scaled: Tensor, ids: Tensor, first: int) -> Tensor:
    """Return the logits of tokens `[rows, k]`, 0 for those of other shards."""
    inside, local = _local(ids, first, scaled.shape[-1])
    return scaled.gather(-1, local).masked_fill(~inside, 0.0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.element_size() < torch.float32.itemsize else tensor
