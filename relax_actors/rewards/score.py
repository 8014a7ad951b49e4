"""A reward function's result: a number, or a `Score` with components and tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from relax_actors.errors import RowError

LARGEST = (2 - 2**-23) * 2.0**127  # the largest finite float32; rewards are stored as float32


@dataclass(frozen=True, slots=True)
class Score:
    """Reward of a sample with its parts.

    Attributes:
        reward: reward of the sample, higher is better; None for the sum of `components`.
        components: parts by name, for metrics and for `algorithm.components`; `reward.components` names them.
        tokens: `[len]` rewards of the sample's own tokens (process rewards), those of its environment included, in the
            order of its sequences; they count beside `reward`. None if the sample is rewarded as a whole.
    """

    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    tokens: Sequence[float] | NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Total:
    """Checked score of a sample, finite in float32; `tokens` is `[len] float64` or None."""

    reward: float
    components: dict[str, float]
    tokens: NDArray[np.float64] | None = None


def checked(value: object, reward_name: str) -> float:
    """Convert a reward to a float that float32 has; raises RowError if not finite."""
    item = getattr(value, "item", None)
    number = item() if callable(item) and getattr(value, "ndim", None) == 0 else value
    if isinstance(number, Real):
        try:
            result = float(number)
        except OverflowError:
            result = float("inf")
        if abs(result) <= LARGEST:
            return result
    msg = f"reward {reward_name} returned {value!r:.200} ({type(value).__name__}); return a finite number or a Score"
    raise RowError(msg)


def total_of(value: object, reward_name: str) -> Total:
    """Check a reward function's result; raises RowError for numbers not finite."""
    if not isinstance(value, Score):
        return Total(checked(value, reward_name), {})
    components = {str(name): checked(part, f"{reward_name} ({name})") for name, part in value.components.items()}
    reward = math.fsum(components.values()) if value.reward is None else value.reward
    return Total(checked(reward, reward_name), components, _tokens(value.tokens, reward_name))


def _tokens(values: object, reward_name: str) -> NDArray[np.float64] | None:
    if values is None:
        return None
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        array = np.zeros((0, 0))
    if array.ndim != 1 or not (np.abs(array) <= LARGEST).all():
        msg = f"reward {reward_name} returned tokens {values!r:.200}; return a finite number for each token, [len]"
        raise RowError(msg)
    return array
