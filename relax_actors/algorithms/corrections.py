"""Off-policy corrections for tokens of another policy, and metrics of the mismatch.

Three policies: `rollout` sampled the tokens (older weights, or the arithmetic of another engine), `proximal` is the one
that the clipped ratio is taken against, and the third one is trained. The importance ratio of a token is
`w = exp(proximal - rollout)`, its log clamped to +-`MAX_LOG_RATIO`. It weights the policy loss, whose own ratio is
`exp(logprobs - proximal)`: clipping limits the step, the weight corrects for the staleness of the data. All bounds are
bounds of w itself (or of its mean or product), never of 1 / w.

Shapes as in `losses`: log-probs `[batch, seq] float32`, masks `[batch, seq] bool`. No gradient flows through a weight
or through the decision to reject a sequence. A sample of several sequences is weighed and rejected sequence by
sequence: each was sampled in a context of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.kl import kl_estimate
from relax_actors.algorithms.losses import MAX_LOG_RATIO, check_same_shape

CorrectionKind = Literal["none", "importance", "tis", "icepop"]
CorrectionLevel = Literal["token", "sequence"]
RejectKind = Literal["none", "geometric", "max", "product", "k2", "k3"]
ICEPOP_LOW = 0.5
"""Lower bound of `icepop` if none is set."""
QUANTILES = {"ratio_p1": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Importance weights of the tokens.

    Attributes:
        weight: `[batch, seq] float32`, detached.
        bounded: `[batch, seq] bool`, true where a bound changed the weight.
    """

    weight: Tensor
    bounded: Tensor


def correction_weights(
    proximal: Tensor,
    rollout: Tensor,
    mask: Tensor,
    *,
    kind: CorrectionKind,
    level: CorrectionLevel = "token",
    low: float | None = None,
    high: float,
) -> TokenWeights:
    """Compute the factor of each token's policy loss from importance ratios w.

    - "none": 1.
    - "importance": w. Decoupled PPO (Hilton et al., arXiv 2110.00641).
    - "tis": min(w, high), and at least `low` if that is set. Truncated importance sampling (Ionides, 2008; for the
      mismatch of engines: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025);
      the lower bound is that of slime and TRL, where it is off by default, too.
    - "icepop": w within [low, high], 0 outside (Ring-1T, arXiv 2510.18855). A token of weight 0 still counts where the
      loss is divided by the number of tokens.

    Args:
        proximal: `[batch, seq] float32`, log-probs of the proximal policy.
        rollout: `[batch, seq] float32`, log-probs that the tokens were sampled with.
        mask: `[batch, seq] bool`, tokens that count.
        kind: which correction.
        level: "token", w of the token; "sequence", the product of w over the sequence, as the weight of all of its
            tokens ("tis" is then sequence-level TIS, "icepop" is masked importance sampling).
        low: lower bound of w, in [0, 1]; None for 0.5 with "icepop" and for none with "tis".
        high: upper bound of w, at least 1.

    Raises:
        ValueError: the shapes differ, or the bounds do not enclose 1.
    """
    if low is None:
        low = ICEPOP_LOW if kind == "icepop" else 0.0
    _check_bounds(low, high)
    check_same_shape(proximal, rollout)
    ratio = _ratio(proximal, rollout)
    if level == "sequence":
        total = _log_sum(proximal, rollout, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = total.exp().to(ratio.dtype).unsqueeze(-1).expand_as(ratio)
    match kind:
        case "none":
            return TokenWeights(torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool))
        case "importance":
            return TokenWeights(ratio, torch.zeros_like(ratio, dtype=torch.bool))
        case "tis":
            return TokenWeights(ratio.clamp(low, high), (ratio < low) | (ratio > high))
        case "icepop":
            outside = (ratio < low) | (ratio > high)
            return TokenWeights(ratio.masked_fill(outside, 0.0), outside)
        case _:
            assert_never(kind)


def kept_sequences(
    proximal: Tensor,
    rollout: Tensor,
    mask: Tensor,
    *,
    kind: RejectKind,
    low: float = 0.5,
    high: float = 2.0,
    max_kl: float = 0.01,
) -> Tensor:
    """Select the sequences whose importance ratios w are close enough to 1 to be trained.

    - "none": all sequences.
    - "geometric": the geometric mean of w, the length-normalised ratio of GSPO (arXiv 2507.18071), is in [low, high].
    - "max": w of every token is in [low, high].
    - "product": the product of w over the sequence is in [low, high].
    - "k2", "k3": the mean over tokens of an estimate of KL(rollout || proximal), (log w)^2 / 2 or w - 1 - log w, is at
      most `max_kl` (as `seq_mean_k2` and `seq_mean_k3` in verl).

    A sequence without tokens is kept.

    Args:
        proximal: `[batch, seq] float32`, log-probs of the proximal policy.
        rollout: `[batch, seq] float32`, log-probs that the tokens were sampled with.
        mask: `[batch, seq] bool`, tokens that count.
        kind: which criterion.
        low: lower bound, in [0, 1].
        high: upper bound, at least 1.
        max_kl: largest mean of "k2" and "k3".

    Returns:
        `[batch] bool`, true for sequences to train.

    Raises:
        ValueError: the shapes differ, or the bounds do not enclose 1.
    """
    _check_bounds(low, high)
    check_same_shape(proximal, rollout)
    check_same_shape(proximal, mask)
    match kind:
        case "none":
            return torch.ones(len(mask), dtype=torch.bool, device=mask.device)
        case "geometric":
            total = _log_sum(proximal, rollout, mask)
            mean = (total / mask.sum(-1).clamp(min=1)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            return (mean >= low) & (mean <= high)
        case "product":
            product = _log_sum(proximal, rollout, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            return (product >= low) & (product <= high)
        case "max":
            ratio = _ratio(proximal, rollout)
            return (((ratio >= low) & (ratio <= high)) | ~mask).all(-1)
        case "k2" | "k3":
            divergence = kl_estimate(rollout, proximal, kind).detach().masked_fill(~mask, 0.0).double().sum(-1)
            return divergence / mask.sum(-1).clamp(min=1) <= max_kl
        case _:
            assert_never(kind)


def kept_by_opsm(logprobs: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, *, threshold: float) -> Tensor:
    """Select the sequences that off-policy sequence masking keeps (DeepSeek-V3.2, arXiv 2512.02556).

    A sequence is dropped if its mean advantage is negative and `mean(proximal - logprobs)` over its tokens is above the
    threshold: the policy has moved away from it already. A sequence without tokens is kept.

    Args:
        logprobs: `[batch, seq] float32`, of the trained policy.
        proximal: `[batch, seq] float32`.
        advantages: `[batch, seq] float32`.
        mask: `[batch, seq] bool`, tokens that count.
        threshold: largest mean log-ratio that is kept.

    Returns:
        `[batch] bool`, true for sequences to train.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(advantages, mask)
    mean = _log_sum(proximal, logprobs, mask) / mask.sum(-1).clamp(min=1)
    negative = advantages.detach().masked_fill(~mask, 0.0).sum(-1, dtype=torch.float64) < 0
    return ~(negative & (mean > threshold))


def mismatch_metrics(logprobs: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """Measure the distance of trainer's and rollout's log-probs, as sums over `mask`.

    With `d = logprobs - rollout`:

    - `tokens`: number of tokens.
    - `abs_delta`: sum of |d|.
    - `k3`: sum of the k3 estimates of KL(rollout || new).
    - `ratio`, `ratio_squared`: sums of exp(d) and exp(2 d); `ratio^2 / ratio_squared` is the effective sample size.
    - `max_ratio`: largest exp(d); 0 without tokens.

    Combine micro-batches with `losses.add_metrics`, then divide by `tokens`. No gradient.

    Args:
        logprobs: `[batch, seq] float32`, of the trainer.
        rollout: `[batch, seq] float32`, that the tokens were sampled with.
        mask: `[batch, seq] bool`, tokens that count.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(logprobs, mask)
    check_same_shape(logprobs, rollout)
    new, old = logprobs.detach()[mask], rollout.detach()[mask]
    k3 = kl_estimate(old, new, "k3").double()
    delta = (new - old).double()
    ratio = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "tokens": float(delta.numel()),
        "abs_delta": delta.abs().sum().item(),
        "k3": k3.sum().item(),
        "ratio": ratio.sum().item(),
        "ratio_squared": ratio.square().sum().item(),
        "max_ratio": ratio.max().item() if delta.numel() else 0.0,
    }


def depth_metrics(logprobs: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """Measure |trainer - rollout| log-prob in both halves of each sequence, as sums.

    `abs_delta_early` and `abs_delta_late` are sums over the tokens that `tokens_early` and `tokens_late` count. The
    middle token of an odd number counts as late. Combine micro-batches with `losses.add_metrics`. No gradient.

    Args:
        logprobs: `[batch, seq] float32`, of the trainer.
        rollout: `[batch, seq] float32`, that the tokens were sampled with.
        mask: `[batch, seq] bool`, tokens that count.
    """
    position = mask.cumsum(-1)
    early = mask & (2 * position <= mask.sum(-1, keepdim=True))
    delta = (logprobs - rollout).detach().abs().masked_fill(~mask, 0.0).double()
    # One transfer from the device for all.
    sums = torch.stack([early.sum().double(), mask.sum().double(), (delta * early).sum(), delta.sum()]).tolist()
    return {
        "tokens_early": sums[0],
        "tokens_late": sums[1] - sums[0],
        "abs_delta_early": sums[2],
        "abs_delta_late": sums[3] - sums[2],
    }


def ratio_quantiles(log_ratios: Sequence[NDArray[Any]]) -> dict[str, float]:
    """Compute quantiles of a step's ratios, `ratio_p1`, `_p50`, `_p99`; 1 without tokens.

    Args:
        log_ratios: `[tokens] float32` of each micro-batch, in any order.
    """
    log_ratio = np.concatenate([np.zeros(0, np.float32), *log_ratios]).astype(np.float64)
    if not len(log_ratio):
        log_ratio = np.zeros(1)
    ratios = np.exp(np.clip(np.quantile(log_ratio, list(QUANTILES.values())), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return dict(zip(QUANTILES, ratios.tolist(), strict=True))


def _ratio(proximal: Tensor, rollout: Tensor) -> Tensor:
    return (proximal - rollout).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _log_sum(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Return the log of each sequence's product of ratios, `[batch] float64`."""
    check_same_shape(numerator, denominator)
    check_same_shape(numerator, mask)
    return (numerator - denominator).detach().masked_fill(~mask, 0.0).double().sum(-1)


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        msg = f"the bounds of the ratio are [{low}, {high}]; they must enclose 1, such as [0.5, 2]"
        raise ValueError(msg)
