"""Losses of reinforcement learning and supervised fine-tuning, one value for each token.

Shapes: log-probs, losses and ratios are `[batch, seq] float32` (natural log); masks are `[batch, seq] bool`, true for
the tokens that count. Values at other positions are ignored, but must be finite.

Invariant: a reduced loss is a sum divided by a count of the whole step, never of the micro-batch. The losses and
gradients of the micro-batches therefore add up to those of the step, however it was split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]
LossMode = Literal["token", "sequence", "constant"]

# exp(20) = 4.9e8. Without a bound, float32 overflows to inf and 0 * inf makes the gradient nan.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Policy loss of each token.

    Attributes:
        loss: `[batch, seq] float32`, carries the gradient.
        clipped: `[batch, seq] bool`, true where a clip bound replaced the ratio, so the loss has no gradient.
        ratio: `[batch, seq] float32`, importance ratio, detached.
    """

    loss: Tensor
    clipped: Tensor
    ratio: Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Compute the log-prob of each target token.

    Computed as `gather - logsumexp`, so no log-softmax over the vocabulary is materialised. Half-precision logits are
    converted to float32 first.

    Args:
        logits: `[batch, seq, vocab]`; position i scores position i of `targets`, so the caller shifts them.
        targets: `[batch, seq] int64`, valid token ids, also at positions that are masked later.
        temperature: divisor of the logits.

    Returns:
        Natural log-probs, `[batch, seq] float32`.

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        msg = f"temperature is {temperature}; score greedy samples at the training temperature, such as 1.0"
        raise ValueError(msg)
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    chosen = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None,
) -> PolicyLoss:
    """Compute PPO's clipped surrogate loss with separate lower and upper clip bounds.

    `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` with `r = exp(logprobs - old_logprobs)` (PPO, arXiv
    1707.06347; clip-higher: DAPO, arXiv 2503.14476). With dual clip, the loss is at most `-A c` where A < 0 (arXiv
    1912.09729). The log-ratio is clamped to +-`MAX_LOG_RATIO`. No gradient flows to `old_logprobs` or `advantages`.

    Args:
        logprobs: `[batch, seq] float32`, of the trained policy.
        old_logprobs: `[batch, seq] float32`, of the policy that the ratio is taken against.
        advantages: `[batch]` or `[batch, seq] float32`.
        clip_low: lower clip distance, in [0, 1].
        clip_high: upper clip distance, at least 0.
        clip_ratio_c: c of dual clip, above 1; None for no dual clip.

    Raises:
        ValueError: shapes do not match, or a bound is out of range.
    """
    _check_clip(clip_low, clip_high, clip_ratio_c)
    check_same_shape(logprobs, old_logprobs)
    weights = advantages.detach()
    if weights.ndim == 1:
        weights = weights.unsqueeze(-1)
    if weights.shape not in {logprobs.shape, (len(logprobs), 1)}:
        msg = (
            f"advantages {list(advantages.shape)} do not match log-probs {list(logprobs.shape)}; pass one value for "
            "each sequence or each token"
        )
        raise ValueError(msg)

    ratio = (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss = torch.maximum(-weights * ratio, -weights * ratio.clamp(1 - clip_low, 1 + clip_high))
    positive, negative = weights > 0, weights < 0
    clipped = (positive & (ratio > 1 + clip_high)) | (negative & (ratio < 1 - clip_low))
    if clip_ratio_c is not None:
        loss = torch.where(negative, torch.minimum(loss, -weights * clip_ratio_c), loss)
        clipped = clipped | (negative & (ratio > clip_ratio_c))
    return PolicyLoss(loss, clipped, ratio.detach())


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Estimate KL(policy || reference) at each token, from tokens sampled by the policy.

    Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), with `d = logprobs - reference_logprobs`:

    - k1: `d`, unbiased.
    - k2: `d^2 / 2`, low variance, biased.
    - k3: `exp(-d) - 1 + d`, unbiased and never negative; `d` is clamped to +-`MAX_LOG_RATIO`.

    As a loss term, on-policy, the expected gradient of k1 is zero, that of k2 is the gradient of KL(policy ||
    reference), and that of k3 is the gradient of KL(reference || policy).

    Args:
        logprobs: `[batch, seq] float32`, of the policy.
        reference_logprobs: `[batch, seq] float32`.
        kind: which estimator.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(logprobs, reference_logprobs)
    delta = logprobs - reference_logprobs
    match kind:
        case "k1":
            return delta
        case "k2":
            return delta.square() / 2
        case "k3":
            bounded = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return torch.expm1(-bounded) + bounded
        case _:
            assert_never(kind)


def reduce_loss(
    per_token: Tensor, mask: Tensor, *, mode: LossMode, normaliser: float, sample_tokens: Tensor | None = None
) -> Tensor:
    """Reduce the losses of a micro-batch to its part of the step's loss, scalar float32.

    - "token" sums over tokens. With the number of tokens of the step as `normaliser`, all tokens have equal weight
      (DAPO, arXiv 2503.14476).
    - "constant" also sums over tokens. With the number of samples of the step times a constant length as `normaliser`,
      the weight of a token depends neither on the length of its sample nor on the lengths of the others (Dr. GRPO,
      arXiv 2503.20783).
    - "sequence" sums the means over the tokens of each sample. With the number of samples of the step as `normaliser`,
      all samples have equal weight (GRPO, arXiv 2402.03300). A sequence without tokens adds 0.

    Args:
        per_token: `[batch, seq] float32`.
        mask: `[batch, seq] bool`, tokens that count.
        mode: "token", "sequence" or "constant".
        normaliser: divisor, from counts of the whole step.
        sample_tokens: `[batch] int64`, tokens of the whole sample of each sequence; None if every sample has one
            sequence. Read by "sequence" only.

    Raises:
        ValueError: the shapes differ, or the normaliser is not positive.
    """
    check_same_shape(per_token, mask)
    if not normaliser > 0:
        msg = f"normaliser is {normaliser}; pass the number of tokens or samples of the step, and skip empty steps"
        raise ValueError(msg)
    sums = per_token.masked_fill(~mask, 0.0).sum(-1)
    if mode == "sequence":
        counts = mask.sum(-1) if sample_tokens is None else sample_tokens
        sums = sums / counts.clamp(min=1)
    return sums.sum() / normaliser


def sft_loss(logprobs: Tensor, mask: Tensor, normaliser: float) -> Tensor:
    """Compute the cross-entropy of the tokens of `mask`, scalar float32.

    Args:
        logprobs: `[batch, seq] float32`.
        mask: `[batch, seq] bool`, tokens that count.
        normaliser: number of these tokens in the whole step.

    Raises:
        ValueError: the shapes differ, or the normaliser is not positive.
    """
    return reduce_loss(-logprobs, mask, mode="token", normaliser=normaliser)


def add_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of micro-batches or ranks: the maximum of `max_*`, the sum of all others."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            elif name.startswith("max_"):
                total[name] = max(total[name], value)
            else:
                total[name] += value
    return total


def _check_clip(clip_low: float, clip_high: float, clip_ratio_c: float | None) -> None:
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        msg = f"clip_low is {clip_low} and clip_high is {clip_high}; use clip_low in [0, 1] and clip_high >= 0"
        raise ValueError(msg)
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        msg = f"clip_ratio_c is {clip_ratio_c}; it must be above 1 (3 is usual), or None for no dual clip"
        raise ValueError(msg)


def check_same_shape(left: Tensor, right: Tensor) -> None:
    """Raise ValueError unless the shapes are equal; broadcasting would hide the mistake."""
    if left.shape != right.shape:
        msg = f"shapes {list(left.shape)} and {list(right.shape)} differ; align both to [batch, seq] first"
        raise ValueError(msg)
