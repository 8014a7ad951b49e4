"""Reward shaping: pure changes of a group's rewards before its advantages."""

from __future__ import annotations

from typing import Any, Literal, assert_never

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
KLKind = Literal["k1", "k2", "k3", "abs"]


def overlong_penalty(lengths: Array, *, max_tokens: int, buffer: int, factor: float = 1.0) -> Array:
    r"""Compute the penalty of long samples: soft overlong punishment (DAPO, arXiv 2503.14476, equation 13).

    $\min(0, \frac{L - B - |y|}{B} \cdot f)$, with the limit L, the buffer B and the factor f: 0 up to L - B tokens,
    then linear, -f at L tokens and beyond. It is added to the reward. verl's continues to fall beyond L.

    Args:
        lengths: `[n]` integers, tokens of each sample.
        max_tokens: the limit L, in the unit of `lengths`.
        buffer: B, from 1 to `max_tokens`.
        factor: f.

    Returns:
        `[n] float64`, from -f to 0.

    Raises:
        ValueError: the buffer is out of range.
    """
    if not 0 < buffer <= max_tokens:
        msg = f"the overlong buffer has {buffer} tokens; set it from 1 to the limit of {max_tokens}"
        raise ValueError(msg)
    excess = (max_tokens - buffer - np.asarray(lengths, np.float64)) / buffer
    penalty: Array = np.clip(excess, -1.0, 0.0) * factor
    return penalty


def length_penalty(rewards: Array, lengths: Array, *, factor: float) -> Array:
    r"""Compute the penalty of samples that are long within their group, after prime-rl.

    $-f \cdot \operatorname{mean}(r) \cdot \frac{|y_i|}{\max_j |y_j|}$, which is added to the reward. A group whose mean
    reward is not positive gets none: the penalty would be a bonus there.

    Args:
        rewards: `[n]`.
        lengths: `[n]` integers, sampled tokens of each sample.
        factor: f.

    Returns:
        `[n] float64`, at most 0.
    """
    longest = int(np.max(lengths, initial=0))
    mean = float(np.asarray(rewards, np.float64).mean())
    if mean <= 0 or not longest:
        return np.zeros(len(rewards))
    penalties: Array = -factor * mean * np.asarray(lengths, np.float64) / longest
    return penalties


def kl_rewards(
    old: Array,
    reference: Array,
    *,
    kind: KLKind = "k1",
    coefficient: float,
    mask: Array,
    clamp: float | None = None,
) -> Array:
    r"""Compute the KL in the reward of each trained token: $-\beta\,k(x)$ with $x = \log \pi_{old} - \log \pi_{ref}$.

    k1 is x, k2 is x^2 / 2, k3 is exp(-x) - 1 + x (http://joschu.net/blog/kl-approx.html), abs is |x|. InstructGPT,
    RLOO (arXiv 2402.14740) and REINFORCE++ (arXiv 2501.03262) use k1. There is no gradient: the log-probs are those
    before the update.

    Args:
        old: `[total]`, log-probs of the proximal policy.
        reference: `[total]`, log-probs of the reference model.
        kind: estimator.
        coefficient: beta.
        mask: `[total] bool`, trained tokens; others get 0.
        clamp: largest magnitude of k(x); None for no bound.

    Returns:
        `[total] float64`.
    """
    x = np.where(mask, np.asarray(old, np.float64) - np.asarray(reference, np.float64), 0.0)
    match kind:
        case "k1":
            estimate = x
        case "k2":
            estimate = x * x / 2
        case "k3":
            estimate = np.expm1(-x) + x
        case "abs":
            estimate = np.abs(x)
        case _:
            assert_never(kind)
    return -coefficient * (estimate if clamp is None else np.clip(estimate, -clamp, clamp))


def has_signal(rewards: Array, tolerance: float = 1e-8) -> bool:
    """Return whether two rewards of a group differ by more than `tolerance`.

    Args:
        rewards: `[n]`.
        tolerance: largest difference that counts as equal.
    """
    values = np.asarray(rewards, np.float64)
    return bool(values.max() - values.min() > tolerance)
