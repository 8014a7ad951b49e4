"""Policy losses and corrections of a careless user."""

from __future__ import annotations

import torch
from torch import Tensor

from relax_actors.algorithms.policy import PolicyInputs


def of_samples(inputs: PolicyInputs) -> Tensor:
    """Return one value for each sequence in place of each token."""
    return -(inputs.advantages * inputs.ratio).mean(-1)


def not_a_number(inputs: PolicyInputs) -> Tensor:
    """Divide 0 by 0."""
    return inputs.log_ratio * (torch.zeros_like(inputs.ratio) / 0)


def without_gradient(inputs: PolicyInputs) -> Tensor:
    return inputs.advantages


def failing(_: PolicyInputs) -> Tensor:
    """Raise an error of its own."""
    text = "no such baseline"
    raise LookupError(text)


def with_own_setting(inputs: PolicyInputs, *, strength: float) -> Tensor:
    return -inputs.ratio * strength


def weights(proximal: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """Weigh by the ratio, at most 1."""
    del mask
    return (proximal - rollout).exp().clamp(max=1.0)


def infinite_weights(proximal: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    del rollout, mask
    return torch.full_like(proximal, float("inf"))
