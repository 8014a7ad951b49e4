"""Reward functions by name."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping

from relax_actors.errors import ConfigError
from relax_actors.messages import Prompt
from relax_actors.registry.dotted import load
from relax_actors.rewards import _math_verify, _reasoning_gym
from relax_actors.rewards._math_verify import math_verify
from relax_actors.rewards._numeric import numeric_match
from relax_actors.rewards._reasoning_gym import reasoning_gym_score
from relax_actors.rewards._text import exact_match, positional_match
from relax_actors.rewards._value import checked

RewardFunction = Callable[[str, Prompt], float]

_BUILT_IN: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "math_verify": math_verify,
    "numeric_match": numeric_match,
    "positional_match": positional_match,
    "reasoning_gym_score": reasoning_gym_score,
}
_PACKAGES = {"math_verify": _math_verify.package, "reasoning_gym_score": _reasoning_gym.package}


def load_reward(path: str, setting: str = "reward.function") -> RewardFunction:
    """Return a built-in reward by its name, or a user's by its dotted path.

    What a user's function returns is not checked here; `checked` does.

    Raises:
        ConfigError: no such reward, its package is not installed, or it does not take (completion, prompt).
    """
    if path in _BUILT_IN:
        _PACKAGES.get(path, lambda: None)()
        return _BUILT_IN[path]
    where = f"{setting} = {path!r}"
    if "." not in path and ":" not in path:
        close = difflib.get_close_matches(path, _BUILT_IN)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        msg = f"{where} is no built-in reward; {hint}use one of {', '.join(_BUILT_IN)}, or package.module.function"
        raise ConfigError(msg)
    reward = load(path, setting)
    if not callable(reward):
        msg = f"{where} is a {type(reward).__name__}; name a function of (completion, prompt) that returns a number"
        raise ConfigError(msg)
    if inspect.iscoroutinefunction(reward) or not _takes_two(reward):
        msg = f"{where} cannot be called with (completion, prompt); write def {path[-40:]}(completion, prompt) -> float"
        raise ConfigError(msg)
    return reward


def load_rewards(weights: Mapping[str, float], setting: str = "reward.function") -> RewardFunction:
    """Return the weighted sum of the rewards named by the keys; each one is checked before it is added.

    Raises:
        ConfigError: no rewards at all, a weight that is no finite number, or what `load_reward` raises.
    """
    if not weights:
        msg = f"{setting} names no reward; give at least one, as in {{ exact_match = 1.0 }}"
        raise ConfigError(msg)
    for path, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            msg = f"{setting}: the weight of {path!r} is {weight!r}; give a finite number"
            raise ConfigError(msg)
    parts = [(path, float(weight), load_reward(path, setting)) for path, weight in weights.items()]

    def weighted(completion: str, prompt: Prompt) -> float:
        return sum(weight * checked(reward(completion, prompt), path) for path, weight, reward in parts)

    return weighted


def _takes_two(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind("completion", "prompt")
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        return True
    return True
