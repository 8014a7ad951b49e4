"""Policy loss, correction and estimator that take options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from relax_actors.algorithms.advantages import Group
    from relax_actors.algorithms.policy import PolicyInputs


def damped(inputs: PolicyInputs, *, clip_high: float, strength: float, kind: Literal["a", "b"] = "a") -> Tensor:
    del kind
    return -inputs.advantages * inputs.ratio.clamp(max=1 + clip_high) * strength


def bounded(proximal: Tensor, rollout: Tensor, mask: Tensor, *, most: float = 1.0) -> Tensor:
    """Weigh by the ratio, at most `most`."""
    del mask
    return (proximal - rollout).exp().clamp(max=most)


def bounded_by_one(proximal: Tensor, rollout: Tensor, mask: Tensor, **settings: object) -> Tensor:
    """Weigh by the ratio, at most 1; a parameter has the name of a setting, and others are ignored."""
    del mask
    assert not settings
    return (proximal - rollout).exp().clamp(max=1.0)


def spread(group: Group, *, factor: float = 1.0, epsilon: float = 0.0) -> NDArray[np.float64]:
    """Multiply distances from the mean; `epsilon` is a setting."""
    centred: NDArray[np.float64] = (group.rewards - group.rewards.mean()) * factor + 0.0 * epsilon
    return centred
