"""KL penalty in the loss: estimators at tokens, clamps, gradients, unbiased form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

from relax_actors.algorithms.losses import MAX_LOG_RATIO, check_same_shape

if TYPE_CHECKING:
    from torch import Tensor

KLKind = Literal["k1", "k2", "k3", "abs"]
KL = {
    "k1": ("x", "x"),
    "k2": ("x^2 / 2", r"\frac{x^2}{2}"),
    "k3": ("exp(-x) - 1 + x", r"e^{-x} - 1 + x"),
    "abs": ("|x|", r"\lvert x \rvert"),
}
"""Formulas of the estimators, with x = lp - ref."""


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Estimate KL(policy || reference) at each token, from tokens sampled by the policy.

    Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), with `d = logprobs - reference_logprobs`:

    - k1: `d`, unbiased.
    - k2: `d^2 / 2`, low variance, biased.
    - k3: `exp(-d) - 1 + d`, unbiased and never negative; `d` is clamped to +-`MAX_LOG_RATIO`.
    - abs: `|d|`, no estimate of a KL, but a distance that verl offers beside the others.

    As a loss term, on-policy, the expected gradient of k1 is zero, that of k2 is the gradient of KL(policy ||
    reference), that of k3 is the gradient of KL(reference || policy), and that of abs is the gradient of the total
    variation, `2 TV(policy, reference)`.

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
            return (-bounded).expm1() + bounded
        case "abs":
            return delta.abs()
        case _:
            assert_never(kind)


def kl_penalty(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    kind: KLKind,
    clamp: float | None = None,
    k2_gradient: bool = False,
    proximal: Tensor | None = None,
) -> Tensor:
    """Compute the KL term of each token's loss, before its coefficient.

    In this order: the estimate of `kl_estimate`; clamped to +-`clamp`, without gradient beyond ("low-variance KL" of
    other engines is k3 with 10); with `k2_gradient` this value with the gradient of k2 (straight-through); multiplied
    by the ratio `exp(logprobs - proximal)` with its gradient, which makes the estimate unbiased for tokens that
    `proximal` sampled (DeepSeek-V3.2, arXiv 2512.02556).

    Args:
        logprobs: `[batch, seq] float32`, of the policy.
        reference_logprobs: `[batch, seq] float32`.
        kind: estimator of the value.
        clamp: largest magnitude; None for no bound.
        k2_gradient: take the gradient of k2, which on-policy is that of KL(policy || reference).
        proximal: `[batch, seq] float32`, log-probs of the policy that sampled; None for no ratio.

    Returns:
        `[batch, seq] float32`, with gradient.

    Raises:
        ValueError: the shapes differ, or the clamp is not positive.
    """
    value = kl_estimate(logprobs, reference_logprobs, kind)
    if clamp is not None:
        if not clamp > 0:
            msg = f"the clamp of the KL is {clamp}; it must be above 0 (10 is usual), or None for no bound"
            raise ValueError(msg)
        value = value.clamp(-clamp, clamp)
    if k2_gradient:
        squared = kl_estimate(logprobs, reference_logprobs, "k2")
        value = value.detach() + squared - squared.detach()
    if proximal is not None:
        check_same_shape(logprobs, proximal)
        value = value * (logprobs - proximal.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return value
