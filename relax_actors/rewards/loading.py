"""Load the reward functions that a configuration names, with their options."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import REWARDS
from relax_actors.registry.options import validated

RewardFunction = Callable[..., Any]
"""Function of (completion, prompt) or (completions, prompt), perhaps with `sample` or `samples`; may be async."""
OPTIONS = "reward.options"
F = TypeVar("F", bound=Callable[..., object])


def load_reward(
    path: str, setting: str = "reward.function", options: Mapping[str, Any] | None = None
) -> RewardFunction:
    """Load a reward function by its name or dotted path; of a class, create an instance.

    `setting` names it in errors. `options` are those of `reward.options.<path>`: keyword-only parameters, of a class
    those of its constructor.

    Raises:
        ConfigError: unknown name, package not installed, a function that does not take (completion, prompt), or an
            option that is unknown, missing or wrong.
    """
    reward: Any = REWARDS.load(path, setting)
    where = f"{setting} = {path!r}"
    if not callable(reward):
        msg = f"{where} is a {type(reward).__name__}; name a function of (completion, prompt) that returns a number"
        raise ConfigError(msg)
    values = _options(reward, path, options or {})
    if inspect.isclass(reward):
        reward = reward(**values)
    getattr(reward, "check_requirements", lambda: None)()
    if values and inspect.isroutine(reward):
        reward = partial(reward, **values)
    if not callable(reward) or not _takes_completion_and_prompt(reward):
        msg = f"{where} cannot be called with (completion, prompt); write def {path[-40:]}(completion, prompt) -> float"
        raise ConfigError(msg)
    return cast("RewardFunction", reward)


def _options(reward: Callable[..., Any], path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a function or class; raises ConfigError."""
    constructor: Callable[..., Any] = reward.__init__ if inspect.isclass(reward) else reward
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(ValueError):  # a built-in function without a signature
        parameters = inspect.signature(constructor).parameters
    names = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    if not names and not given:
        return {}
    where = f'{OPTIONS}."{path}"' if "." in path else f"{OPTIONS}.{path}"
    try:
        hints = typing.get_type_hints(constructor, include_extras=True) if names else {}
    except (NameError, TypeError) as error:
        msg = f"{where}: the annotations of {path} give no options: {type(error).__name__}: {error}"
        raise ConfigError(msg) from error
    defaults = {name: ... if (p := parameters[name]).default is p.empty else p.default for name in names}
    return validated({name: (hints.get(name, Any), defaults[name]) for name in names}, given, where, path)


def parameters_of(function: RewardFunction) -> frozenset[str]:
    """Return which of `completions`, `sample` and `samples` are parameters of a reward function."""
    try:
        names = inspect.signature(function).parameters
    except ValueError:  # a built-in function without a signature
        return frozenset()
    return frozenset(names) & {"completions", "sample", "samples"}


def is_async(function: RewardFunction) -> bool:
    """Whether calls of a reward function are awaited."""
    call = getattr(function, "func", function)
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004 a class


def _takes_completion_and_prompt(function: Callable[..., object]) -> bool:
    try:
        more = dict.fromkeys(parameters_of(function) - {"completions"})
        inspect.signature(function).bind("completion", "prompt", **more)
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        return True
    return True


def requires(check: Callable[[], object]) -> Callable[[F], F]:
    """Decorate a reward function with a check that runs when the function is loaded.

    It raises `ConfigError` if the function cannot work, e.g. because its package is not installed.
    """

    def decorate(function: F) -> F:
        function.check_requirements = check  # type: ignore[attr-defined]
        return function

    return decorate
