"""Policy losses, corrections and advantages of a careless user."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_actors.algorithms.advantages import Group
from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.specs import AdvantageSpec, LossSpec

Array = NDArray[np.float64]


def of_samples(inputs: PolicyInputs) -> Tensor:
    """Return one value for each sequence in place of each token."""
    return -(inputs.advantages * inputs.ratio).mean(-1)


def not_a_number(inputs: PolicyInputs) -> Tensor:
    """Divide 0 by 0."""
    return inputs.log_ratio * (torch.zeros_like(inputs.ratio) / 0)


def without_gradient(inputs: PolicyInputs) -> Tensor:
    return inputs.advantages


def of_the_micro_batch(inputs: PolicyInputs) -> Tensor:
    """Subtract the mean advantage of the micro-batch from each."""
    return -(inputs.advantages - inputs.advantages.mean()) * inputs.ratio


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


def weights_of_the_micro_batch(proximal: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    ratio = (proximal - rollout).exp()
    return ratio / ratio[mask].mean().clamp(min=1e-6) if mask.any() else ratio


def infinite_weights(proximal: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    del rollout, mask
    return torch.full_like(proximal, float("inf"))


def infinite_slope(inputs: PolicyInputs) -> Tensor:
    """Return a finite loss whose gradient is not, where the ratio is 1."""
    distance = inputs.logprobs - inputs.proximal
    return (distance * distance).sqrt()


def without_fault(inputs: PolicyInputs) -> Tensor:
    return -inputs.ratio * inputs.advantages


def one_flag(inputs: PolicyInputs) -> PolicyLoss:
    """Return one flag for a whole sequence in place of one for each token."""
    return PolicyLoss(-inputs.ratio * inputs.advantages, inputs.mask.any(-1), inputs.ratio)


def flags_of_numbers(inputs: PolicyInputs) -> PolicyLoss:
    return PolicyLoss(-inputs.ratio * inputs.advantages, torch.zeros_like(inputs.ratio), inputs.ratio)


def numbers(advantages: Array) -> Array:
    return advantages


def no_choice(covariance: Array) -> Array:
    return covariance > 0


@LossSpec(choose=numbers)
def choosing_numbers(inputs: PolicyInputs) -> Tensor:
    """Choose tokens by numbers in place of flags."""
    return without_fault(inputs)


@LossSpec(choose=no_choice)
def failing_choice(inputs: PolicyInputs) -> Tensor:
    """Choose tokens by an array that the step does not have."""
    return without_fault(inputs)


@AdvantageSpec()
def with_facts_of_an_estimator(inputs: PolicyInputs) -> Tensor:
    return without_fault(inputs)


@LossSpec()
def with_facts_of_a_loss(group: Group) -> Array:
    return group.totals


def pairs(group: Group) -> Array:
    """Return two numbers for each sample."""
    return np.zeros((group.n, 2))


def share_of_rewards(group: Group) -> Array:
    """Divide by 0 where all rewards are equal."""
    with np.errstate(invalid="ignore"):
        found: Array = (group.totals - group.totals.mean()) / (group.totals - group.totals.mean())
    return found


def absent_component(group: Group) -> Array:
    return group.components["fluency"]


def broadcast(group: Group) -> Array:
    """Raise numpy's ValueError for shapes that do not fit."""
    return group.totals * np.ones(group.n + 1)


def only_varied(group: Group) -> Array:
    """Refuse equal rewards, deliberately."""
    if group.totals.min() == group.totals.max():
        text = "rewards are equal"
        raise ValueError(text)
    return group.totals
