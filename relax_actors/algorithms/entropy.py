"""Log-probs and entropies over the full vocabulary, chunk by chunk of tokens.

Invariant: no tensor of the size of the logits is held besides the logits and, in the backward pass, their gradient.
Intermediate results have the size of a chunk; the backward pass computes them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Logits of a chunk: 16 MiB in float32."""


class Shards:
    """Reductions over the ranks that share the vocabulary; this one is for a vocabulary in one place.

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


class _LogprobsAndEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits: Tensor, targets: Tensor, temperature: float, shards: Shards
    ) -> tuple[Tensor, Tensor]:
        rows, found = logits.shape[0], _float(logits.dtype)
        logprobs, entropies = (torch.empty(rows, dtype=found, device=logits.device) for _ in range(2))
        normalisers = torch.empty(rows, dtype=found, device=logits.device)
        for part in _chunks(logits):
            scaled = _scaled(logits[part], temperature, found, shards.width)
            peak = shards.max(scaled.max(-1).values)
            exponentials = (scaled - peak[:, None]).exp_()
            total = shards.sum(exponentials.sum(-1))
            normaliser = peak + total.log()
            # Probabilities that underflow contribute 0, also where a logit is -inf.
            mean = shards.sum((exponentials * scaled.masked_fill(exponentials == 0, 0.0)).sum(-1)) / total
            logprobs[part] = shards.sum(_chosen(scaled, targets[part, None], shards.first))[:, 0] - normaliser
            entropies[part], normalisers[part] = normaliser - mean, normaliser
        context.save_for_backward(logits, targets, entropies, normalisers)
        context.temperature, context.shards = temperature, shards
        return logprobs, entropies

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, entropies, normalisers = context.saved_tensors
        of_logprobs, of_entropies = gradients
        result = torch.empty_like(logits)
        for part in _chunks(logits):
            scaled = _scaled(logits[part], context.temperature, entropies.dtype, context.shards.width)
            logp = scaled - normalisers[part][:, None]
            probability = logp.exp()
            # d logprob / d z = [target] - p, and d entropy / d z = -p (log p + entropy).
            gradient = (logp.masked_fill_(probability == 0, 0.0) + entropies[part][:, None]).mul_(
                -of_entropies[part][:, None]
            )
            gradient.sub_(of_logprobs[part][:, None]).mul_(probability)
            inside, local = _local(targets[part], context.shards.first, logits.shape[-1])
            gradient.scatter_add_(-1, local[:, None], (of_logprobs[part] * inside)[:, None])
            result[part] = gradient.div_(context.temperature).to(result.dtype)
        return result, None, None, None


def logprobs_and_entropies(
    logits: Tensor, targets: Tensor, temperature: float, shards: Shards | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each target token, and the entropy of each token's distribution.

    `H = logsumexp(z) - sum(softmax(z) z)` in nats over the full vocabulary, with z = logits / temperature; top-p and
    top-k are not applied. Both outputs carry gradients. Half-precision logits are computed in float32, chunk by chunk.

    Args:
        logits: `[..., vocab]`; of this rank's shard of the vocabulary if `shards` is given.
        targets: `[...] int64`, valid token ids.
        temperature: divisor of the logits.
        shards: reductions over the ranks that share the vocabulary; None if it is in one place.

    Returns:
        Natural log-probs and entropies, each `[...] float32` (float64 for float64 logits).

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        msg = f"temperature is {temperature}; score greedy samples at the training temperature, such as 1.0"
        raise ValueError(msg)
    flat = logits.reshape(-1, logits.shape[-1])
    apply: Callable[..., tuple[Tensor, Tensor]] = _LogprobsAndEntropies.apply
    logprobs, entropies = apply(flat, targets.reshape(-1), temperature, shards or Shards())
    return logprobs.view(targets.shape), entropies.view(targets.shape)


class _LogprobsAt(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: Tensor, ids: Tensor, temperature: float, shards: Shards) -> Tensor:
        found = _float(logits.dtype)
        logprobs = torch.empty(ids.shape, dtype=found, device=logits.device)
        normalisers = torch.empty(logits.shape[0], dtype=found, device=logits.device)
        for part in _chunks(logits):
            scaled = _scaled(logits[part], temperature, found, shards.width)
            peak = shards.max(scaled.max(-1).values)
            normalisers[part] = peak + shards.sum((scaled - peak[:, None]).exp_().sum(-1)).log()
            logprobs[part] = shards.sum(_chosen(scaled, ids[part], shards.first)) - normalisers[part, None]
        context.save_for_backward(logits, ids, normalisers)
        context.temperature, context.shards = temperature, shards
        return logprobs

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, ids, normalisers = context.saved_tensors
        result = torch.empty_like(logits)
        for part in _chunks(logits):
            scaled = _scaled(logits[part], context.temperature, normalisers.dtype, context.shards.width)
            # d logprob[k] / d z = [ids[k]] - p.
            of_logprobs = gradients[0][part]
            gradient = (scaled - normalisers[part, None]).exp_().mul_(-of_logprobs.sum(-1, keepdim=True))
            inside, local = _local(ids[part], context.shards.first, logits.shape[-1])
            gradient.scatter_add_(-1, local, of_logprobs * inside)
            result[part] = gradient.div_(context.temperature).to(result.dtype)
        return result, None, None, None


def logprobs_at(logits: Tensor, ids: Tensor, temperature: float, shards: Shards | None = None) -> Tensor:
    """Compute log-probs of several tokens at each position, with gradient.

    Args:
        logits: `[tokens, vocab]`; of this rank's shard of the vocabulary if `shards` is given.
        ids: `[tokens, k] int64`, valid token ids.
        temperature: divisor of the logits.
        shards: reductions over the ranks that share the vocabulary; None if it is in one place.

    Returns:
        `[tokens, k] float32` (float64 for float64 logits).
    """
    apply: Callable[..., Tensor] = _LogprobsAt.apply
    return apply(logits, ids, temperature, shards or Shards())


@torch.no_grad()
def squared_probabilities(logits: Tensor, temperature: float, shards: Shards | None = None) -> Tensor:
    """Compute the sum of the squared probabilities over the vocabulary, `sum(softmax(logits / temperature)^2)`.

    Without gradient, chunk by chunk. For the optimal token baseline (arXiv 2602.07078).

    Args:
        logits: `[..., vocab]`; of this rank's shard of the vocabulary if `shards` is given.
        temperature: divisor of the logits.
        shards: reductions over the ranks that share the vocabulary; None if it is in one place.

    Returns:
        `[...] float32` (float64 for float64 logits).
    """
    shards = shards or Shards()
    flat = logits.reshape(-1, logits.shape[-1])
    found = torch.empty(flat.shape[0], dtype=_float(logits.dtype), device=logits.device)
    for part in _chunks(flat):
        scaled = _scaled(flat[part], temperature, found.dtype, shards.width)
        exponentials = (scaled - shards.max(scaled.max(-1).values)[:, None]).exp_()
        total = shards.sum(exponentials.sum(-1))
        found[part] = shards.sum(exponentials.square().sum(-1)) / total.square()
    return found.view(logits.shape[:-1])


def _chunks(logits: Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]


def _scaled(logits: Tensor, temperature: float, dtype: torch.dtype, width: int | None) -> Tensor:
    """Return logits / temperature in another dtype, -inf at the padding of the vocabulary."""
    scaled = logits.to(dtype) / temperature
    if width is not None:
        scaled[:, width:] = float("-inf")
    return scaled


def _float(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _local(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return which targets this shard holds, and their index in it (0 for others)."""
    local = targets - first
    inside = (local >= 0) & (local < width)
    return inside, local.masked_fill(~inside, 0)


def _chosen(scaled: Tensor, ids: Tensor, first: int) -> Tensor:
    """Return the logits of tokens `[rows, k]`, 0 for those of other shards."""
    inside, local = _local(ids, first, scaled.shape[-1])
    return scaled.gather(-1, local).masked_fill(~inside, 0.0)
