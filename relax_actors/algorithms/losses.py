"""Losses of reinforcement learning and supervised fine-tuning, one value a token.

Shapes everywhere: log-probs, losses and ratios are `[batch, seq] float32` (natural log), masks `[batch, seq] bool`,
true for the tokens that count. What a masked-out position holds does not matter as long as it is finite.

Invariant: a reduced loss is a sum divided by a number of the whole step, never of the micro-batch. So the losses and
the gradients of the micro-batches of a step add up to those of the step, however it was cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]
LossMode = Literal["token", "sequence"]

# exp(20) is 4.9e8: keeps float32 from overflowing to inf, and 0 * inf from becoming nan in the gradient.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The policy loss of each token.

    `loss [batch, seq] float32` carries the gradient. `ratio [batch, seq] float32` is the importance ratio, detached.
    `clipped [batch, seq] bool` is true where a clip bound replaced the ratio, so that the loss has no gradient there.
    """

    loss: Tensor
    clipped: Tensor
    ratio: Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probs `[batch, seq] float32` of `targets [batch, seq] int64` under `logits [batch, seq, vocab]`.

    The logits are divided by `temperature`; position i of them scores position i of the targets: the caller shifts.
    Gather minus logsumexp never holds a log-softmax of all the vocabulary; half-precision logits are widened first.
    Targets that are masked out later must still be valid token ids. Raises ValueError when the temperature is not
    positive.
    """
    if not temperature > 0:
        msg = f"temperature is {temperature}; score greedy samples with the temperature of training, such as 1.0"
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
    """PPO's clipped surrogate with its own bound on either side; `advantages` is `[batch]` or `[batch, seq] float32`.

    `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` with `r = exp(logprobs - old_logprobs)` (PPO, arXiv
    1707.06347; clip-higher: DAPO, arXiv 2503.14476). `clip_ratio_c` is dual clip's c: where A < 0 the loss is at most
    `-A c` (arXiv 1912.09729); None leaves it out. The log-ratio is held within +-`MAX_LOG_RATIO`. No
    gradient flows to `old_logprobs` or `advantages`. Raises ValueError when shapes or bounds do not fit.
    """
    _check_clip(clip_low, clip_high, clip_ratio_c)
    check_same_shape(logprobs, old_logprobs)
    weights = advantages.detach()
    if weights.ndim == 1:
        weights = weights.unsqueeze(-1)
    if weights.shape not in {logprobs.shape, (len(logprobs), 1)}:
        msg = f"advantages {list(advantages.shape)} do not fit log-probs {list(logprobs.shape)}; pass one a sequence"
        raise ValueError(msg)

    ratio = (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss = torch.maximum(-weights * ratio, -weights * ratio.clamp(1 - clip_low, 1 + clip_high))
    gains, harms = weights > 0, weights < 0
    clipped = (gains & (ratio > 1 + clip_high)) | (harms & (ratio < 1 - clip_low))
    if clip_ratio_c is not None:
        loss = torch.where(harms, torch.minimum(loss, -weights * clip_ratio_c), loss)
        clipped = clipped | (harms & (ratio > clip_ratio_c))
    return PolicyLoss(loss, clipped, ratio.detach())


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Estimate of KL(policy || reference) at each token, from tokens sampled by the policy.

    Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), with `d = logprobs - reference_logprobs`:
    k1 = d is unbiased; k2 = d^2 / 2 has little variance and some bias; k3 = exp(-d) - 1 + d is unbiased and never
    negative. As a term of the loss, on-policy, the expected gradient of k1 is zero, of k2 the KL's, of k3 that of
    the other direction, KL(reference || policy). k3 holds d within +-`MAX_LOG_RATIO`. Raises ValueError when the
    shapes differ.
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
    """Reduce a micro-batch to its share of the step's loss, scalar float32.

    "token" sums over tokens: with the step's number of tokens as `normaliser` every token weighs the same (DAPO,
    arXiv 2503.14476); with samples times the longest allowed length it is Dr. GRPO's constant (arXiv 2503.20783).
    "sequence" sums the mean over the tokens of each sample: with the step's number of samples as `normaliser` every
    sample weighs the same (GRPO, arXiv 2402.03300). A sequence without tokens adds 0.

    Args:
        per_token: `[batch, seq] float32`.
        mask: `[batch, seq] bool`, tokens that count.
        mode: "token" or "sequence".
        normaliser: divisor of the whole step.
        sample_tokens: `[batch] int64`, tokens of the whole sample that each sequence belongs to; None where every
            sample has one sequence. Only "sequence" reads it.

    Raises:
        ValueError: the shapes differ, or the normaliser is not positive.
    """
    check_same_shape(per_token, mask)
    if not normaliser > 0:
        msg = f"normaliser is {normaliser}; pass the tokens or sequences of the whole step, and skip an empty step"
        raise ValueError(msg)
    sums = per_token.masked_fill(~mask, 0.0).sum(-1)
    if mode == "sequence":
        counts = mask.sum(-1) if sample_tokens is None else sample_tokens
        sums = sums / counts.clamp(min=1)
    return sums.sum() / normaliser


def sft_loss(logprobs: Tensor, mask: Tensor, normaliser: float) -> Tensor:
    """Scalar float32: cross-entropy of the masked tokens over `normaliser`, the number of such tokens in the step."""
    return reduce_loss(-logprobs, mask, mode="token", normaliser=normaliser)


def add_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Join the metrics of micro-batches or ranks: `max_*` keeps the largest, all else is summed."""
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
        msg = f"clip_low is {clip_low} and clip_high {clip_high}; they must be in [0, 1] and at least 0"
        raise ValueError(msg)
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        msg = f"clip_ratio_c is {clip_ratio_c}; it must be above 1 (3 is usual), or None for no dual clip"
        raise ValueError(msg)


def check_same_shape(left: Tensor, right: Tensor) -> None:
    """Refuse tensors that broadcasting would join silently; raises ValueError."""
    if left.shape != right.shape:
        msg = f"shapes {list(left.shape)} and {list(right.shape)} differ; align both to [batch, seq] first"
        raise ValueError(msg)
