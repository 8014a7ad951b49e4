"""A policy loss of one's own: a token stops training as soon as its ratio has moved by `clip_high`."""

from __future__ import annotations

import torch

from relax_actors.algorithms.policy import PolicyInputs


def hinge(inputs: PolicyInputs, *, clip_high: float) -> torch.Tensor:
    """Return `max(0, clip_high - sign(A) (ratio - 1)) |A|` of each token.

    Args:
        inputs: tokens of a micro-batch.
        clip_high: setting `algorithm.clip_high`.
    """
    gain = inputs.advantages.sign() * (inputs.ratio - 1)
    return (clip_high - gain).relu() * inputs.advantages.abs()
