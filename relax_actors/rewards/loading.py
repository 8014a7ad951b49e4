"""Load the reward functions that a configuration names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from numbers import Real
from typing import TypeVar

from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import Prompt, Sample
from relax_actors.registry.catalog import REWARDS

RewardFunction = Callable[..., float]
"""Function of (completion, prompt) or, with a parameter of the name `sample`, of (completion, prompt, sample)."""


def load_reward(path: str, setting: str = "reward.function") -> RewardFunction:
    """Load a reward function by its name or dotted path.

    Its values are not checked here; see `checked`.

    Raises:
        ConfigError: unknown name, package not installed, or a function that does not take (completion, prompt), and
            perhaps `sample`.
    """
    reward = REWARDS.load(path, setting)
    where = f"{setting} = {path!r}"
    if not callable(reward):
        msg = f"{where} is a {type(reward).__name__}; name a function of (completion, prompt) that returns a number"
        raise ConfigError(msg)
    if inspect.iscoroutinefunction(reward) or not _takes_completion_and_prompt(reward):
        msg = f"{where} cannot be called with (completion, prompt); write def {path[-40:]}(completion, prompt) -> float"
        raise ConfigError(msg)
    getattr(reward, "check_requirements", lambda: None)()
    return reward


def load_rewards(weights: Mapping[str, float], setting: str = "reward.function") -> RewardFunction:
    """Weighted sum of several reward functions; the value of each is checked before it is added.

    Args:
        weights: weight of each function, by name or dotted path.
        setting: the configuration key that errors quote.

    Raises:
        ConfigError: the table is empty, a weight is not a finite number, or as `load_reward`.
    """
    if not weights:
        msg = f"{setting} names no reward; give at least one, as in {{ exact_match = 1.0 }}"
        raise ConfigError(msg)
    for path, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            msg = f"{setting}: the weight of {path!r} is {weight!r}; give a finite number"
            raise ConfigError(msg)
    parts = [(path, float(weight), load_reward(path, setting)) for path, weight in weights.items()]

    def weighted(completion: str, prompt: Prompt, sample: Sample | None = None) -> float:
        return sum(
            weight * checked(call_reward(reward, completion, prompt, sample), path) for path, weight, reward in parts
        )

    return weighted


def call_reward(function: RewardFunction, completion: str, prompt: Prompt, sample: Sample | None) -> object:
    """Call a reward function, with the sample if it has a parameter for it."""
    return function(completion, prompt, sample=sample) if takes_sample(function) else function(completion, prompt)


@lru_cache(maxsize=256)
def takes_sample(function: RewardFunction) -> bool:
    """Whether a reward function has a parameter `sample`: it reads the conversation, the metrics or the turns."""
    try:
        return "sample" in inspect.signature(function).parameters
    except ValueError:  # a built-in function without a signature
        return False


def _takes_completion_and_prompt(function: Callable[..., object]) -> bool:
    try:
        more = {"sample": None} if takes_sample(function) else {}
        inspect.signature(function).bind("completion", "prompt", **more)
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        return True
    return True


LARGEST = (2 - 2**-23) * 2.0**127  # the largest finite float32; rewards are stored as float32


def checked(value: object, reward_name: str) -> float:
    """Convert the value of a reward function to a float that is finite as float32; a bool is 0 or 1.

    Raises:
        RowError: the value is not a real number, or not finite.
    """
    item = getattr(value, "item", None)
    number = item() if callable(item) and getattr(value, "ndim", None) == 0 else value
    if isinstance(number, Real):
        try:
            result = float(number)
        except OverflowError:
            result = float("inf")
        if abs(result) <= LARGEST:
            return result
    msg = f"reward {reward_name} returned {value!r:.200} ({type(value).__name__}); return a finite number"
    raise RowError(msg)


F = TypeVar("F", bound=Callable[..., object])


def requires(check: Callable[[], object]) -> Callable[[F], F]:
    """Decorate a reward function with a check that runs when the function is loaded.

    Args:
        check: raises `ConfigError` if the function cannot work, e.g. because its package is not installed.
    """

    def decorate(function: F) -> F:
        function.check_requirements = check  # type: ignore[attr-defined]
        return function

    return decorate
