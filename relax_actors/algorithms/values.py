"""Value loss of a critic, one value for each token, and how well values explain returns.

Shapes are `[batch, seq] float32`; masks are `[batch, seq] bool`, true for the tokens that count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from relax_actors.algorithms.losses import check_same_shape


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Value loss of each token.

    Attributes:
        loss: `[batch, seq] float32`, carries the gradient.
        clipped: `[batch, seq] bool`, true where the clipped value gives the larger error, so the loss has no gradient.
    """

    loss: Tensor
    clipped: Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> ValueLoss:
    r"""Compute the squared error of values, clipped around the values before the batch (PPO, arXiv 1707.06347).

    $\tfrac12 \max((V - R)^2, (V_\text{old} + \operatorname{clip}(V - V_\text{old}, -c, c) - R)^2)$.

    The factor 1/2 is that of verl and TRL; slime has none. No gradient flows to `old_values` or `returns`.

    Args:
        values: V, of the trained critic.
        old_values: V_old, of the critic before the batch.
        returns: R, the targets.
        clip: c; 0 for no clipping.

    Raises:
        ValueError: the shapes differ, or `clip` is negative.
    """
    if clip < 0:
        msg = f"clip is {clip}; use a distance of at least 0, where 0 means no clipping"
        raise ValueError(msg)
    check_same_shape(values, old_values)
    check_same_shape(values, returns)
    targets = returns.detach()
    error = (values - targets).square()
    if not clip:
        return ValueLoss(error / 2, torch.zeros_like(error, dtype=torch.bool))
    old = old_values.detach()
    moved = values - old
    bounded = (old + moved.clamp(-clip, clip) - targets).square()
    # Within the clip range the two errors differ by rounding only.
    return ValueLoss(torch.maximum(error, bounded) / 2, (bounded > error) & (moved.abs() > clip))


def measure_values(values: Tensor, returns: Tensor, loss: ValueLoss, mask: Tensor) -> dict[str, float]:
    """Return sums over the tokens of a micro-batch, for `value_metrics`."""
    value, target = values.detach()[mask].double(), returns[mask].double()
    error = target - value
    return {
        "tokens": float(mask.sum()),
        "value_loss": float(loss.loss.detach()[mask].double().sum()),
        "value_clipped": float(loss.clipped[mask].sum()),
        "value": float(value.sum()),
        "return": float(target.sum()),
        "return_squared": float(target.square().sum()),
        "error": float(error.sum()),
        "error_squared": float(error.square().sum()),
    }


def value_metrics(measured: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an update from sums over all of its tokens.

    `explained_variance` is `1 - Var(R - V) / Var(R)`: 1 for perfect values, 0 for a constant or for equal returns.

    Args:
        measured: sums of `measure_values` over all micro-batches, and further measurements, which are kept.
    """
    tokens = max(measured["tokens"], 1.0)
    names = ("value_loss", "value_clipped", "value", "return", "return_squared", "error", "error_squared")
    means = {name: measured[name] / tokens for name in names}
    spread = means.pop("return_squared") - means["return"] ** 2
    unexplained = means.pop("error_squared") - means.pop("error") ** 2
    # Below rounding of the sums, the returns are equal.
    explained = 1.0 - unexplained / spread if spread > 1e-12 * max(means["return"] ** 2, 1.0) else 0.0
    rest = {name: value for name, value in measured.items() if name not in names}
    return rest | means | {"explained_variance": explained}
