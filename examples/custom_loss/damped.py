"""A policy loss that damps large ratios of a token, the more the further its whole sample has moved."""

from __future__ import annotations

from torch import Tensor

from relax_actors import PolicyInputs


def damped(inputs: PolicyInputs, *, clip_high: float, power: float = 2.0) -> Tensor:
    """Return `-A r / (1 + (m / clip_high)^power)` for each token, `[batch, seq]`.

    Args:
        inputs: tokens of a micro-batch. r is their ratio, m the mean of |log r| over the tokens of the whole sample.
        clip_high: setting algorithm.clip_high.
        power: option algorithm.options.power.
    """
    distance = inputs.sample_sum("distance", inputs.log_ratio.abs()) / inputs.sample_tokens.clamp(min=1)[:, None]
    return -inputs.advantages * inputs.ratio / (1 + (distance / clip_high) ** power)
