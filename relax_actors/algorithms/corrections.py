"""Corrections for tokens that were not sampled by the policy that is trained, and measures of how far they are from it.

Three policies are at work: `rollout` sampled the tokens (with older weights, or another engine's arithmetic),
`proximal` is the one that the clipped ratio is taken against, and the third is trained. The importance ratio of a
token is `w = exp(proximal - rollout)`, its log held within +-`MAX_LOG_RATIO`. It weighs the clipped surrogate of
`losses.policy_loss`, whose own ratio is `exp(logprobs - proximal)`: clipping bounds the step, and the weight alone
answers for the staleness of the data.

Shapes as in `losses`: log-probs `[batch, seq] float32`, masks `[batch, seq] bool`. No gradient flows through a weight
or a decision to reject.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.losses import MAX_LOG_RATIO, check_same_shape, kl_estimate

CorrectionKind = Literal["none", "importance", "tis", "icepop"]
RejectKind = Literal["none", "geometric", "max"]
QUANTILES = {"ratio_p1": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """`weight [batch, seq] float32`, detached; `bounded [batch, seq] bool` is true where a bound changed it."""

    weight: Tensor
    bounded: Tensor


def token_weights(proximal: Tensor, rollout: Tensor, *, kind: CorrectionKind, low: float, high: float) -> TokenWeights:
    """The factor of each token's policy loss, from its importance ratio w.

    "none" is 1. "importance" is w: decoupled PPO (Hilton et al., arXiv 2110.00641). "tis" is min(w, high):
    truncated importance sampling (Ionides, 2008; against the mismatch of engines: Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training", 2025). "icepop" is w within [low, high] and 0 outside of it
    (Ring-1T, arXiv 2510.18855). A masked token still counts where the loss is divided by the number of tokens.
    Raises ValueError when the shapes differ or the bounds do not enclose 1.
    """
    _check_bounds(low, high)
    check_same_shape(proximal, rollout)
    ratio = _ratio(proximal, rollout)
    match kind:
        case "none":
            return TokenWeights(torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool))
        case "importance":
            return TokenWeights(ratio, torch.zeros_like(ratio, dtype=torch.bool))
        case "tis":
            return TokenWeights(ratio.clamp(max=high), ratio > high)
        case "icepop":
            outside = (ratio < low) | (ratio > high)
            return TokenWeights(ratio.masked_fill(outside, 0.0), outside)
        case _:
            assert_never(kind)


def kept_sequences(
    proximal: Tensor, rollout: Tensor, mask: Tensor, *, kind: RejectKind, low: float, high: float
) -> Tensor:
    """Which sequences are near enough to be trained at all, `[batch] bool`, from the ratios w of their tokens.

    "none" keeps all. "geometric" keeps a sequence whose geometric mean of w, the length-normalised ratio of GSPO
    (arXiv 2507.18071), is within [low, high]. "max" keeps one each of whose tokens has w within [low, high]: a single
    impossible token condemns it. A sequence without tokens is kept. Raises ValueError when the shapes differ or the
    bounds do not enclose 1.
    """
    _check_bounds(low, high)
    check_same_shape(proximal, rollout)
    check_same_shape(proximal, mask)
    match kind:
        case "none":
            return torch.ones(len(mask), dtype=torch.bool, device=mask.device)
        case "geometric":
            delta = (proximal - rollout).detach().masked_fill(~mask, 0.0).double()
            mean = (delta.sum(-1) / mask.sum(-1).clamp(min=1)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            return (mean >= low) & (mean <= high)
        case "max":
            ratio = _ratio(proximal, rollout)
            return (((ratio >= low) & (ratio <= high)) | ~mask).all(-1)
        case _:
            assert_never(kind)


def mismatch_metrics(logprobs: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the trainer's log-probs are from those the tokens were sampled with, as sums over the masked tokens.

    With `d = logprobs - rollout`: `tokens`; `abs_delta`, sum of |d|; `k3`, of the k3 estimate of KL(rollout || new);
    `ratio` and `ratio_squared`, of exp(d) and its square (`ratio^2 / ratio_squared` is the effective sample size);
    and `max_ratio`, their largest. Add micro-batches up with `losses.add_metrics`, then divide by `tokens`. No
    gradient. Raises ValueError when the shapes differ.
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


def ratio_quantiles(log_ratios: Sequence[NDArray[Any]]) -> dict[str, float]:
    """Quantiles of the ratios of a step, exact: `ratio_p1`, `ratio_p50`, `ratio_p99`; 1 if there is no token.

    Args:
        log_ratios: those of each micro-batch, `[tokens] float32`, in any order.
    """
    whole = np.concatenate([np.zeros(0, np.float32), *log_ratios]).astype(np.float64)
    if not len(whole):
        whole = np.zeros(1)
    found = np.exp(np.clip(np.quantile(whole, list(QUANTILES.values())), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return dict(zip(QUANTILES, found.tolist(), strict=True))


def _ratio(proximal: Tensor, rollout: Tensor) -> Tensor:
    return (proximal - rollout).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        msg = f"the ratio's bounds are [{low}, {high}]; they must enclose 1, such as [0.5, 2]"
        raise ValueError(msg)
